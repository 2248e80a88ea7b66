# From 4 x 4 to 8 x 8 pixels, on the images of the folder pictures in the working directory.
_base_ = './tiny_text.py'

image_shape = (8, 8, 3)
source_shape = (4, 4, 3)
embedding = dict(type='aft_mm.PixelEmbedding', num_channels=3)
model = dict(
    encoder=dict(
        type='aft_mm.SequenceEncoder',
        embed_dims=16,
        num_layers=1,
        embedding=embedding,
        token_mixer=dict(type='aft_mm.AFTSimple'),
        grid=(4, 4),
    ),
    decoder=dict(
        embedding=dict(_delete_=True, **embedding),
        token_mixer=dict(window=(3, 3)),
        grid=(8, 8),
        cross_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=2),
    ),
    head=dict(
        _delete_=True,
        type='aft_mm.LogisticMixtureHead',
        embed_dims=16,
        num_channels=3,
        num_components=2,
    ),
)

pipeline = [
    dict(type='aft_mm.LoadRGBImage'),
    dict(type='aft_mm.SuperResolutionPair', size=8, scale_factor=2),
    dict(type='aft_mm.PackSequence', image_shape=image_shape, tokens='pixels'),
]
dataset = dict(_delete_=True, type='aft_mm.ImageFolder', data_root='pictures', pipeline=pipeline)
train_dataloader = dict(batch_size=2, dataset=dataset)
val_dataloader = dict(batch_size=2, dataset=dict(test_mode=True, **dataset))
val_evaluator = dict(per='dim')
test_dataloader = val_dataloader
test_evaluator = [
    dict(type='aft_mm.Likelihood', per='dim'),
    dict(type='aft_mm.ImageQuality', image_shape=image_shape, source_shape=source_shape),
]
test_cfg = dict(type='aft_mm.GenerationTestLoop', num_samples=2, temperature=0.8, num_inputs=3)
default_hooks = dict(
    checkpoint=dict(save_best='bits_per_dim'),
    samples=dict(
        type='aft_mm.SuperResolutionHook',
        image_shape=image_shape,
        source_shape=source_shape,
        interval=2,
        num_images=2,
    ),
)
