# ADE20K, 150 classes, crops of 512 x 512.
_base_ = 'mmseg::_base_/datasets/ade20k.py'

data_root = '{{$AFT_MM_DATA:data}}/ade/ADEChallengeData2016'

train_dataloader = dict(batch_size=2, dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = val_dataloader
