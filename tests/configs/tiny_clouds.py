# Point clouds, sampled during training and compared with the test set in a test.
_base_ = './tiny_points.py'

point_cloud = dict(num_points=8, num_bits=8, up='y')
model = dict(decoder=dict(embedding=dict(num_kinds=3), tokens_per_position=3))
test_evaluator = [
    dict(type='aft_mm.Likelihood', per='dim'),
    dict(type='aft_mm.PointCloudDistance', num_bits=8),
]
test_cfg = dict(type='aft_mm.GenerationTestLoop')
default_hooks = dict(
    samples=dict(type='aft_mm.PointCloudHook', num_bits=8, up='y', interval=2, num_samples=2)
)
