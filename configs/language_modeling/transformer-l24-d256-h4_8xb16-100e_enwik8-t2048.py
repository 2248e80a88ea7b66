_base_ = './transformer-l24-d256-h4_8xb16-100e_enwik8-t1024.py'

model = dict(decoder=dict(grid=(2048,)))
train_dataloader = dict(dataset=dict(context_length=2048))
val_dataloader = dict(dataset=dict(context_length=2048))
test_dataloader = dict(dataset=dict(context_length=2048))
