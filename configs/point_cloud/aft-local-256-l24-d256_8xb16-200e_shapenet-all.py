_base_ = [
    '../_base_/models/ar_points.py',
    '../_base_/datasets/shapenet.py',
    '../_base_/schedules/ar_200e.py',
    '../_base_/ar_runtime.py',
]

# A window of 256 coordinates, about 85 points. Window, rank and recipe are those of CIFAR-10, our choice.
# Blocks are recomputed: their activations would take 62 GB of a GPU.
model = dict(
    decoder=dict(with_cp=True, token_mixer=dict(type='aft_mm.AFTLocal', window=256, rank=64))
)

train_dataloader = dict(batch_size=16)
test_cfg = dict(type='aft_mm.GenerationTestLoop', num_samples=1, temperature=1.0, num_inputs=1024)
default_hooks = dict(data_report=dict(type='aft_mm.SkippedDataReportHook'))
