_base_ = './aft-local2d-mini_1xb8-16e_celeba-8to32.py'

# Your own images, at least 32 x 32, below <data_root>/{train,val,test}/; the largest central square
# is shrunk.
data_root = '{{$AFT_MM_DATA:data}}/images'
pipeline = [
    dict(type='aft_mm.LoadRGBImage'),
    dict(type='aft_mm.SuperResolutionPair', size=32, scale_factor=4),
    dict(type='aft_mm.PackSequence', image_shape={{_base_.image_shape}}, tokens='pixels'),
]

train_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type='aft_mm.ImageFolder',
        data_root=f'{data_root}/train',
        pipeline=[
            pipeline[0],
            dict(type='mmpretrain.RandomFlip', prob=0.5, direction='horizontal'),
            *pipeline[1:],
        ],
    )
)
val_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type='aft_mm.ImageFolder',
        data_root=f'{data_root}/val',
        pipeline=pipeline,
        test_mode=True,
    )
)
test_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type='aft_mm.ImageFolder',
        data_root=f'{data_root}/test',
        pipeline=pipeline,
        test_mode=True,
    )
)
default_hooks = dict(check_images=dict(type='aft_mm.CheckImagesHook'))  # of validation and test
