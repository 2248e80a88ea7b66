# Chairs of ModelNet10 as PCD files of 1,024 points, <data_root>/chair/{train,test}/*.pcd, quantised
# and then sorted. The curve shows the test set.
data_root = '{{$AFT_MM_DATA:data}}/modelnet10_pcd'
point_cloud = dict(num_points=1024, num_bits=8, up='z')

train_pipeline = [
    dict(type='aft_mm.LoadPoints'),
    dict(type='aft_mm.PackPointCloud', num_points=1024, num_bits=8, order='quantized'),
]
# The same points of a shape in every evaluation.
test_pipeline = [
    dict(type='aft_mm.LoadPoints'),
    dict(type='aft_mm.PackPointCloud', num_points=1024, num_bits=8, order='quantized', seed=0),
]

train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='aft_mm.PointClouds',
        data_root=data_root,
        classes=('chair',),
        split='train',
        pipeline=train_pipeline,
    ),
)

val_dataloader = dict(
    batch_size=10,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.PointClouds',
        data_root=data_root,
        classes=('chair',),
        split='test',
        pipeline=test_pipeline,
        test_mode=True,
    ),
)
val_evaluator = dict(type='aft_mm.Likelihood', per='dim')

test_dataloader = val_dataloader
test_evaluator = [
    dict(type='aft_mm.Likelihood', per='dim'),
    dict(type='aft_mm.PointCloudDistance', num_bits=8),
]

custom_hooks = [dict(type='aft_mm.PointCloudHook', num_bits=8, up='z', interval=10)]
