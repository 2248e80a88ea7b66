_base_ = [
    '../_base_/models/ar_subpixels.py',
    '../_base_/datasets/cifar10_ar.py',
    '../_base_/schedules/ar_200e.py',
    '../_base_/ar_runtime.py',
]

# Blocks are recomputed: their activations would take 35 GB of a GPU.
model = dict(
    decoder=dict(with_cp=True, token_mixer=dict(type='aft_mm.AFTLocalLearned', window=256, rank=64))
)

train_dataloader = dict(batch_size=16)
