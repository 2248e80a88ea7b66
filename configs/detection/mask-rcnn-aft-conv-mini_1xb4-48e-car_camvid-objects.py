_base_ = [
    '../_base_/models/mask_rcnn_aft_conv_mini.py',
    '../_base_/datasets/camvid_objects.py',
    '../_base_/schedules/det_mini.py',
    '../_base_/det_runtime.py',
]

# Pedestrians and bicyclists cover a few places of the map each.
metainfo = dict(classes=('car',))

train_dataloader = dict(batch_size=4, dataset=dict(metainfo=metainfo))
val_dataloader = dict(dataset=dict(metainfo=metainfo))
test_dataloader = dict(dataset=dict(metainfo=metainfo))
train_cfg = dict(max_epochs=48, val_interval=8)
optim_wrapper = dict(optimizer=dict(lr=4e-4))
