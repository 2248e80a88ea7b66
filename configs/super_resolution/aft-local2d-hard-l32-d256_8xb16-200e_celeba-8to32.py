_base_ = [
    '../_base_/models/super_resolution.py',
    '../_base_/datasets/celeba_8to32.py',
    '../_base_/schedules/ar_200e.py',
    '../_base_/ar_runtime.py',
]

# W = 1 in a block of 8 x 8 pixels that ends at the target and in one above to the right, else 0.
model = dict(decoder=dict(token_mixer=dict(type='aft_mm.AFTLocalHard', window=(16, 16))))

# Learning rate and dropout are those of the paper's CIFAR-10 models, our choice.
train_dataloader = dict(batch_size=16)
test_cfg = dict(type='aft_mm.GenerationTestLoop', num_samples=4, temperature=0.8, num_inputs=1024)
default_hooks = dict(data_report=dict(type='aft_mm.SkippedDataReportHook'))
