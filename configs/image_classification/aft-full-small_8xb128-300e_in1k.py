# AFT-full small, on ImageNet-1K with the recipe of DeiT.
# Top-1 in table 7 of arXiv 2105.14103: 79.8 %; not trained here.
#     bash tools/dist_train.sh CONFIG 8
_base_ = [
    '../_base_/models/aft_full.py',
    '../_base_/datasets/imagenet_deit_224.py',
    '../_base_/schedules/deit_300e.py',
    '../_base_/default_runtime.py',
]

model = dict(backbone=dict(arch='small'), head=dict(in_channels=384))

train_dataloader = dict(batch_size=128)
