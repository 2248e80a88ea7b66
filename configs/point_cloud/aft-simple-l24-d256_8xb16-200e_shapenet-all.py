_base_ = [
    '../_base_/models/ar_points.py',
    '../_base_/datasets/shapenet.py',
    '../_base_/schedules/ar_200e.py',
    '../_base_/ar_runtime.py',
]

# The recipe is that of the paper's CIFAR-10 models, our choice.
# Blocks are recomputed: their activations would take 58 GB of a GPU.
model = dict(decoder=dict(with_cp=True, token_mixer=dict(type='aft_mm.AFTSimple')))

train_dataloader = dict(batch_size=16)
test_cfg = dict(type='aft_mm.GenerationTestLoop', num_samples=1, temperature=1.0, num_inputs=1024)
default_hooks = dict(data_report=dict(type='aft_mm.SkippedDataReportHook'))
