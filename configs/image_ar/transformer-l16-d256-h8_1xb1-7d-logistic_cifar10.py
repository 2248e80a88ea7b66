_base_ = '../_base_/recipes/7d-logistic_cifar10.py'

model = dict(
    decoder=dict(
        num_layers=16,
        grid=(32 * 32 * 3,),
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=8),
    )
)

train_dataloader = dict(batch_size=1)
auto_scale_lr = dict(base_batch_size=1)
