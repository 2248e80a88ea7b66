_base_ = './aft-local-32-l24-d256_8xb16-100e_enwik8-t1024.py'

# Blocks are recomputed: their activations would take 41 GB of a GPU.
model = dict(decoder=dict(with_cp=True, grid=(4096,)))
train_dataloader = dict(dataset=dict(context_length=4096))
val_dataloader = dict(dataset=dict(context_length=4096))
test_dataloader = dict(dataset=dict(context_length=4096))
