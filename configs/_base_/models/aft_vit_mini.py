# A small ViT on an 8 x 8 grid of tokens, pooled.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='aft_mm.AFTViT',
        arch=dict(embed_dims=96, num_layers=5, mlp_ratio=4),
        out_type='avg_featmap',
        drop_path_rate=0.1,
        # About 1 / sqrt(96); the usual 0.02 is made for wide models.
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.1),
    ),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=96,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
    ),
)
