# The decoder of tiny_text.py on clouds of 8 points in clouds/ of the working directory.
_base_ = './tiny_text.py'

model = dict(decoder=dict(grid=(24,)))
train_dataloader = dict(
    batch_size=4,
    dataset=dict(
        _delete_=True,
        type='aft_mm.PointClouds',
        data_root='clouds',
        pipeline=[dict(type='aft_mm.LoadPoints'), dict(type='aft_mm.PackPointCloud', num_points=8)],
    ),
)
val_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type='aft_mm.PointClouds',
        data_root='clouds',
        split='val',
        pipeline=[
            dict(type='aft_mm.LoadPoints'),
            dict(type='aft_mm.PackPointCloud', num_points=8, seed=0),
        ],
    )
)
val_evaluator = dict(per='dim')
test_dataloader = val_dataloader
test_evaluator = val_evaluator
default_hooks = dict(
    checkpoint=dict(save_best='bits_per_dim'), data_report=dict(type='aft_mm.SkippedDataReportHook')
)
