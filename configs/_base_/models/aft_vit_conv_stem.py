# A convolutional stem, then three blocks of 96 channels on an 8 x 8 grid, pooled.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='aft_mm.AFTViT',
        arch=dict(embed_dims=96, num_layers=3, mlp_ratio=2),
        img_size=32,
        patch_size=4,
        conv_stem=True,
        out_type='avg_featmap',
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
