_base_ = [
    '../_base_/models/mask_rcnn_aft_conv_mini.py',
    '../_base_/datasets/coco_mini.py',
    '../_base_/schedules/det_mini.py',
    '../_base_/det_runtime.py',
]

# One class of 80: the others have few objects.
metainfo = dict(classes=('person',), palette=[(220, 20, 60)])

train_dataloader = dict(batch_size=4, dataset=dict(metainfo=metainfo))
val_dataloader = dict(dataset=dict(metainfo=metainfo))
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=160, val_interval=20)
optim_wrapper = dict(optimizer=dict(lr=4e-4))
