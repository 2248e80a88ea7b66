# Nothing random but the order of the images: the same in one process and in two.
_base_ = './tiny.py'

model = dict(backbone=dict(drop_path_rate=0.0))
train_dataloader = dict(dataset=dict(pipeline=[dict(type='PackInputs')]))
