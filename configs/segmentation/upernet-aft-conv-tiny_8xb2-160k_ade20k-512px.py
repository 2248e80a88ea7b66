_base_ = [
    '../_base_/models/upernet_aft_conv.py',
    '../_base_/datasets/ade20k.py',
    '../_base_/schedules/seg_160k.py',
    '../_base_/seg_runtime.py',
]
