_base_ = [
    '../_base_/models/super_resolution.py',
    '../_base_/datasets/celeba_8to32.py',
    '../_base_/schedules/ar_200e.py',
    '../_base_/ar_runtime.py',
]

# The Image Transformer's blocks of 256 pixels, and as many before them.
model = dict(
    encoder=dict(embed_dims=512),
    decoder=dict(
        embed_dims=512,
        num_layers=12,
        grid=(32 * 32,),
        token_mixer=dict(type='aft_mm.LocalSoftmaxAttention', num_heads=8, window=256),
    ),
    head=dict(embed_dims=512),
)

# The paper tuned learning rate and dropout for this task and does not print them: those of its
# CIFAR-10 models, 3e-3 and 0.1, are a choice of this project.
train_dataloader = dict(batch_size=16)
test_cfg = dict(type='aft_mm.GenerationTestLoop', num_samples=4, temperature=0.8, num_inputs=1024)
default_hooks = dict(data_report=dict(type='aft_mm.SkippedDataReportHook'))
