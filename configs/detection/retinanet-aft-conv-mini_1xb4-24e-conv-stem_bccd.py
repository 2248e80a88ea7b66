# AFT-conv behind three convolutions instead of one projection of patches.
_base_ = [
    '../_base_/models/retinanet_aft_conv_mini.py',
    '../_base_/datasets/bccd.py',
    '../_base_/schedules/det_mini.py',
    '../_base_/det_runtime.py',
]

model = dict(backbone=dict(conv_stem=True), bbox_head=dict(num_classes=3))

train_dataloader = dict(batch_size=4)
train_cfg = dict(max_epochs=24)
