_base_ = '../_base_/recipes/7d-logistic_cifar10.py'

model = dict(
    decoder=dict(
        num_layers=16,
        grid=(32 * 32 * 3,),
        token_mixer=dict(type='aft_mm.AFTLocal', window=256, rank=64),
    )
)
