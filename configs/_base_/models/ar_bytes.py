# Text byte by byte. L = 24, d = 256, T = 1024.
model = dict(
    type='aft_mm.AutoregressiveModel',
    decoder=dict(
        type='aft_mm.SequenceDecoder',
        embed_dims=256,
        num_layers=24,
        embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=256),
        grid=(1024,),
        drop_rate=0.1,
    ),
    head=dict(type='aft_mm.CategoricalHead', embed_dims=256, num_classes=256),
)
