# Only the order of the images is random, so one and two processes give the same result.
_base_ = './tiny.py'

model = dict(backbone=dict(drop_path_rate=0.0))
train_dataloader = dict(dataset=dict(pipeline=[dict(type='PackInputs')]))
