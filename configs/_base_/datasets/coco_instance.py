# COCO 2017 with boxes and masks, where OpenMMLab users have it.
_base_ = 'mmdet::_base_/datasets/coco_instance.py'

data_root = '{{$AFT_MM_DATA:data}}/coco/'

train_dataloader = dict(dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val2017.json')
test_evaluator = val_evaluator
