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

# Learning rate and dropout are those of the paper's CIFAR-10 models, our choice.
train_dataloader = dict(batch_size=16)
test_cfg = dict(type='aft_mm.GenerationTestLoop', num_samples=4, temperature=0.8, num_inputs=1024)
default_hooks = dict(data_report=dict(type='aft_mm.SkippedDataReportHook'))
