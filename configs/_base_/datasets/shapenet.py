# ShapeNetCore v2, <data_root>/<synset>/{train,val,test}/*.npy with 15,000 points each
# (`aft_mm convert shapenet`), of which 2,048 are sampled, sorted and then quantised to 8
# bits.
data_root = '{{$AFT_MM_DATA:data}}/ShapeNetCore.v2.PC15k'
point_cloud = dict(num_points=2048, num_bits=8, up='y')

train_pipeline = [
    dict(type='aft_mm.LoadPoints'),
    dict(type='aft_mm.PackPointCloud', num_points=2048, num_bits=8, order='raw'),
]
# The same points of a shape in every evaluation.
test_pipeline = [
    dict(type='aft_mm.LoadPoints'),
    dict(type='aft_mm.PackPointCloud', num_points=2048, num_bits=8, order='raw', seed=0),
]

train_dataloader = dict(
    num_workers=4,
    persistent_workers=False,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='aft_mm.PointClouds',
        data_root=data_root,
        classes='all',
        split='train',
        pipeline=train_pipeline,
    ),
)

val_dataloader = dict(
    batch_size=16,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.PointClouds',
        data_root=data_root,
        classes='all',
        split='val',
        pipeline=test_pipeline,
        test_mode=True,
    ),
)
val_evaluator = dict(type='aft_mm.Likelihood', per='dim')

test_dataloader = dict(
    batch_size=16,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.PointClouds',
        data_root=data_root,
        classes='all',
        split='test',
        pipeline=test_pipeline,
        test_mode=True,
    ),
)
test_evaluator = [
    dict(type='aft_mm.Likelihood', per='dim'),
    dict(type='aft_mm.PointCloudDistance', num_bits=8),
]

custom_hooks = [dict(type='aft_mm.PointCloudHook', num_bits=8, up='y', interval=10)]
