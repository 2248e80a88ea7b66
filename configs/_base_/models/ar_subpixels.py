# A 32 x 32 image as 3,072 sub-pixels, R, G, B of a pixel one after the other: one table of
# embeddings and one prediction head for the three colours. L = 24, d = 256; the configs choose the
# token mixer.
model = dict(
    type='aft_mm.AutoregressiveModel',
    decoder=dict(
        type='aft_mm.SequenceDecoder',
        embed_dims=256,
        num_layers=24,
        embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=256),
        grid=(32 * 32 * 3,),
        drop_rate=0.1,
    ),
    head=dict(type='aft_mm.CategoricalHead', embed_dims=256, num_classes=256),
)
