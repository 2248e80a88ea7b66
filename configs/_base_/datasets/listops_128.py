# ListOps of 33 to 128 tokens, 5 levels and 5 elements per list.
_base_ = './listops.py'

train_dataloader = dict(
    dataset=dict(max_length=128, min_length=33, max_depth=5, max_args=5),
)
val_dataloader = dict(
    dataset=dict(max_length=128, min_length=33, max_depth=5, max_args=5),
)
test_dataloader = dict(
    dataset=dict(max_length=128, min_length=33, max_depth=5, max_args=5),
)
