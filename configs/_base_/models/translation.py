# OpenNMT's base Transformer: 6 + 6 layers, d 512, 8 heads, one table for source, target and output.
# The configs choose the self-attention of the decoder. Ours: pre-norm blocks with GELU, and the
# grids, the longest sentences.
model = dict(
    type='aft_mm.AutoregressiveModel',
    encoder=dict(
        type='aft_mm.SequenceEncoder',
        embed_dims=512,
        num_layers=6,
        embedding=None,
        positions='sinusoidal',
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=8),
        grid=(256,),
        drop_rate=0.1,
    ),
    decoder=dict(
        type='aft_mm.SequenceDecoder',
        embed_dims=512,
        num_layers=6,
        embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=37000, scaled=True),
        positions='sinusoidal',
        cross_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=8),
        grid=(256,),
        drop_rate=0.1,
    ),
    head=dict(
        type='aft_mm.CategoricalHead',
        embed_dims=512,
        num_classes=37000,
        tied=True,
        label_smoothing=0.1,
    ),
)
