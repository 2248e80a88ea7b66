_base_ = [
    '../_base_/models/retinanet_aft_conv.py',
    '../_base_/datasets/coco_detection.py',
    '../_base_/schedules/det_1x.py',
    '../_base_/det_runtime.py',
]
