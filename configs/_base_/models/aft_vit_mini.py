# A small ViT on an 8 x 8 grid of tokens, pooled; the leaves choose the token mixer.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='aft_mm.AFTViT',
        arch=dict(embed_dims=128, num_layers=6, mlp_ratio=4),
        out_type='avg_featmap',
        drop_path_rate=0.1),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=128,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02)))
