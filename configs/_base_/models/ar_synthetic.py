# Two blocks of 64 channels, our choice.
model = dict(
    type='aft_mm.AutoregressiveModel',
    decoder=dict(
        type='aft_mm.SequenceDecoder',
        embed_dims=64,
        num_layers=2,
        mlp_ratio=2,
        embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=32, scaled=True),
        positions='sinusoidal',
        grid=(16,),
        # About 1 / sqrt(64); the usual 0.02 is made for wide models.
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.125),
    ),
    head=dict(type='aft_mm.CategoricalHead', embed_dims=64, num_classes=32),
)
