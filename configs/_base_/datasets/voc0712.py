# PASCAL VOC 2007 and 2012, three times an epoch.
_base_ = 'mmdet::_base_/datasets/voc0712.py'

data_root = '{{$AFT_MM_DATA:data}}/VOCdevkit/'
filter_cfg = dict(filter_empty_gt=True, min_size=32, bbox_min_size=32)

train_dataloader = dict(
    dataset=dict(
        dataset=dict(
            datasets=[
                dict(
                    type='VOCDataset',
                    data_root=data_root,
                    ann_file='VOC2007/ImageSets/Main/trainval.txt',
                    data_prefix=dict(sub_data_root='VOC2007/'),
                    filter_cfg=filter_cfg,
                    pipeline={{_base_.train_pipeline}},
                ),
                dict(
                    type='VOCDataset',
                    data_root=data_root,
                    ann_file='VOC2012/ImageSets/Main/trainval.txt',
                    data_prefix=dict(sub_data_root='VOC2012/'),
                    filter_cfg=filter_cfg,
                    pipeline={{_base_.train_pipeline}},
                ),
            ]
        )
    )
)
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = val_dataloader
