_base_ = [
    '../_base_/models/mask_rcnn_aft_conv.py',
    '../_base_/datasets/coco_instance.py',
    '../_base_/schedules/det_1x.py',
    '../_base_/det_runtime.py',
]
