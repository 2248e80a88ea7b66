_base_ = './aft-conv-small-h384-k15_8xb128-300e_in1k.py'

# The model of the config above, trained at 224 px, sees images of 384 px (in the paper 81.6 instead of
# 81.0). It has no parameter that depends on the size, so it is tested and not trained:
#     python tools/test.py THIS CHECKPOINT_OF_THE_224_LEAF
model = dict(backbone=dict(img_size=384))

# The crop covers 0.875 of the short edge.
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='ResizeEdge', scale=438, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=384),
    dict(type='PackInputs'),
]

val_dataloader = dict(batch_size=32, dataset=dict(pipeline=test_pipeline))
test_dataloader = dict(batch_size=32, dataset=dict(pipeline=test_pipeline))

tta_pipeline = test_pipeline[:-1] + [
    dict(
        type='TestTimeAug',
        transforms=[
            [dict(type='RandomFlip', prob=0.0), dict(type='RandomFlip', prob=1.0)],
            [dict(type='PackInputs')],
        ],
    )
]
