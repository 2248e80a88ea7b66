# BCCD with its boxes in VOC's format.
_base_ = './bccd.py'

train_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type='VOCDataset',
        data_root={{_base_.data_root}},
        ann_file='ImageSets/Main/train.txt',
        data_prefix=dict(sub_data_root=''),
        metainfo={{_base_.metainfo}},
        filter_cfg=dict(filter_empty_gt=True),
        pipeline={{_base_.train_pipeline}},
    )
)
val_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type='VOCDataset',
        data_root={{_base_.data_root}},
        ann_file='ImageSets/Main/val.txt',
        data_prefix=dict(sub_data_root=''),
        metainfo={{_base_.metainfo}},
        test_mode=True,
        pipeline={{_base_.test_pipeline}},
    )
)
test_dataloader = val_dataloader
val_evaluator = dict(_delete_=True, type='VOCMetric', metric='mAP', eval_mode='area')
test_evaluator = val_evaluator
