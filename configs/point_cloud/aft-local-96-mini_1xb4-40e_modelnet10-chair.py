# AFT-local-96 on the chairs of ModelNet10, 1,024 points each: 4.271 bits per dim on the test set.
#     aft_mm train aft-local-96-mini_1xb4-40e_modelnet10-chair --amp
# The number is of a run with --cfg-options model.decoder.token_mixer.init_std=0.01.
_base_ = [
    '../_base_/models/ar_points.py',
    '../_base_/datasets/modelnet10_chair.py',
    '../_base_/schedules/ar_mini.py',
    '../_base_/ar_runtime.py',
]

# 1,024 points, and a window of 32 of them.
model = dict(
    decoder=dict(
        embed_dims=128,
        num_layers=4,
        grid=(1024 * 3,),
        token_mixer=dict(type='aft_mm.AFTLocal', window=96, rank=32),
    ),
    head=dict(embed_dims=128),
)

train_dataloader = dict(batch_size=4)
train_cfg = dict(max_epochs=40)
test_cfg = dict(type='aft_mm.GenerationTestLoop', num_samples=1, temperature=1.0)
default_hooks = dict(data_report=dict(type='aft_mm.SkippedDataReportHook'))
custom_hooks = [
    dict(
        type='aft_mm.PointCloudHook',
        num_bits={{_base_.point_cloud.num_bits}},
        up={{_base_.point_cloud.up}},
        interval=10,
    )
]
