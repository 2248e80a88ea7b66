_base_ = [
    '../_base_/datasets/wsj.py',
    '../_base_/schedules/ctc_radam_plateau.py',
    '../_base_/ar_runtime.py',
]

# The recurrent baseline of arXiv 2006.16236, §4.3.
model = dict(
    type='aft_mm.CTCModel',
    encoder=dict(type='aft_mm.BiLSTMEncoder', num_features=40, hidden_dims=320, num_layers=3),
    head=dict(type='aft_mm.CTCHead', embed_dims=640, num_classes=41),
)

# Its own rate, reduced in the same way; by how much the paper does not say.
optim_wrapper = dict(optimizer=dict(type='Adam', lr=1e-3))

train_dataloader = dict(batch_size=16)
