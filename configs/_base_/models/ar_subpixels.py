# A 32 x 32 image as 3,072 sub-pixels, with one table of embeddings and one head for the three
# colours. L = 24, d = 256.
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
