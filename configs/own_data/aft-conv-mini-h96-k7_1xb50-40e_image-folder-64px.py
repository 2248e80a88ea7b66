# One folder of images per class: my_images/train/cat/1.jpg, my_images/val/dog/2.png.
_base_ = [
    '../_base_/models/aft_vit_mini.py',
    '../_base_/datasets/image_folder.py',
    '../_base_/schedules/mini.py',
    '../_base_/default_runtime.py',
]

data_root = '{{$AFT_MM_DATA:data}}/my_images'
num_classes = 3

model = dict(
    backbone=dict(
        img_size=64,
        patch_size=8,
        token_mixer=dict(type='aft_mm.AFTConv', num_heads=96, kernel_size=7),
        position_embedding=False,
    ),
    head=dict(num_classes=num_classes),
)
data_preprocessor = dict(num_classes=num_classes)

train_dataloader = dict(dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = dict(dataset=dict(data_root=data_root))
train_cfg = dict(max_epochs=40)
