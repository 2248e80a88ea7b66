# Images in the folder layout of ImageNet in the working directory.
_base_ = './tiny.py'

model = dict(backbone=dict(in_channels=3))
data_preprocessor = dict(mean=[0.0, 0.0, 0.0], std=[255.0, 255.0, 255.0])
train_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type='CustomDataset',
        data_root='{{$AFT_MM_DATA:data}}/pictures',
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='Resize', scale=8),
            dict(type='PackInputs'),
        ],
    )
)
