_base_ = [
    '../_base_/models/retinanet_aft_conv.py',
    '../_base_/datasets/voc0712.py',
    '../_base_/schedules/det_1x.py',
    '../_base_/det_runtime.py',
]

model = dict(bbox_head=dict(num_classes=20))
