# The decoder of arXiv 2006.16236, §4.2: 28 x 28 grey pixels, each from a mixture of 10 logistics, L
# = 8, d = 256. Dropout 0.1 is our choice.
model = dict(
    type='aft_mm.AutoregressiveModel',
    decoder=dict(
        type='aft_mm.SequenceDecoder',
        embed_dims=256,
        num_layers=8,
        embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=256),
        grid=(28 * 28,),
        drop_rate=0.1,
    ),
    head=dict(type='aft_mm.LogisticMixtureHead', embed_dims=256, num_channels=1, num_components=10),
)
