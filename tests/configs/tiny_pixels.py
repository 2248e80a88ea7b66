# The decoder of tiny_text.py on the digits of scikit-learn, pixel by pixel.
_base_ = './tiny_text.py'

image_shape = (8, 8, 1)
pipeline = [dict(type='aft_mm.PackSequence', image_shape=image_shape)]
model = dict(decoder=dict(grid=(8, 8), token_mixer=dict(window=(3, 3))))
train_dataloader = dict(
    dataset=dict(_delete_=True, type='aft_mm.Digits', split='train', indices=96, pipeline=pipeline)
)
val_dataloader = dict(
    dataset=dict(_delete_=True, type='aft_mm.Digits', split='test', indices=65, pipeline=pipeline)
)
val_evaluator = dict(per='dim')
test_dataloader = val_dataloader
test_evaluator = val_evaluator
default_hooks = dict(
    checkpoint=dict(save_best='bits_per_dim'),
    samples=dict(
        type='aft_mm.SampleHook', image_shape=image_shape, interval=2, num_samples=5, num_images=2
    ),
)
