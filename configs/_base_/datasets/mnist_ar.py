# MNIST, <data_root>/train-images-idx3-ubyte.gz and so on, as sequences of 784 grey values. The
# curve shows the test set.
data_root = '{{$AFT_MM_DATA:data}}/mnist'
image_shape = (28, 28, 1)

pipeline = [dict(type='aft_mm.PackSequence', image_shape=image_shape, tokens='subpixels')]

# The images are in memory already.
train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='aft_mm.MNISTIdx', data_root=data_root, split='train', pipeline=pipeline),
)

val_dataloader = dict(
    batch_size=50,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='aft_mm.MNISTIdx', data_root=data_root, split='test', pipeline=pipeline),
)
val_evaluator = dict(type='aft_mm.Likelihood', per='dim')

test_dataloader = val_dataloader
test_evaluator = val_evaluator

custom_hooks = [dict(type='aft_mm.SampleHook', image_shape=image_shape, interval=10)]
