_base_ = './aft-local-96-mini_1xb4-40e_modelnet10-chair.py'

# 15,000 points of each official mesh of ModelNet10 by `aft_mm convert shapenet`:
# <data_root>/chair/{train,test}/*.npy. Four times as many chairs, so a quarter of the epochs.
data_root = '{{$AFT_MM_DATA:data}}/ModelNet10.PC15k'

train_dataloader = dict(dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = dict(dataset=dict(data_root=data_root))
train_cfg = dict(max_epochs=10)
