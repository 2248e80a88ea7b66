_base_ = '../_base_/recipes/7d-logistic_cifar10.py'

# Whole pixels, T = 1024: the mixture of PixelCNN++, whose green depends on red, and blue on both.
model = dict(
    decoder=dict(
        num_layers=16,
        embedding=dict(_delete_=True, type='aft_mm.PixelEmbedding', num_channels=3),
        grid=(32 * 32,),
        token_mixer=dict(type='aft_mm.AFTLocal', window=32, rank=64),
    ),
    head=dict(num_channels=3),
)

pipeline = [dict(type='aft_mm.PackSequence', image_shape={{_base_.image_shape}}, tokens='pixels')]
train_dataloader = dict(batch_size=4, dataset=dict(pipeline=pipeline))
val_dataloader = dict(dataset=dict(pipeline=pipeline))
test_dataloader = dict(dataset=dict(pipeline=pipeline))
