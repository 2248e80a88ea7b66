# Lambda tiny of arXiv 2105.14103, table 7: DeiT without class token, global average pooling, |k| =
# 16 over the full context, 3 heads (small: 6).
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='aft_mm.AFTViT',
        arch='tiny',
        img_size=224,
        patch_size=16,
        token_mixer=dict(type='aft_mm.LambdaLayer', num_heads=3, key_dims=16),
        with_cls_token=False,
        position_embedding=True,
        out_type='avg_featmap',
        drop_path_rate=0.1,
    ),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        in_channels=192,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02),
    ),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)
