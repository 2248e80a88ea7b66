# 8 x 8 pixels to 32 x 32, whole pixels from a mixture of logistics. L = 32, d = 256. As in the
# paper, only the decoder's token mixer varies: the input is read by softmax attention of 8 heads.
# Our choices: 4 encoder blocks, dropout 0.1, 10 components.
model = dict(
    type='aft_mm.AutoregressiveModel',
    encoder=dict(
        type='aft_mm.SequenceEncoder',
        embed_dims=256,
        num_layers=4,
        embedding=dict(type='aft_mm.PixelEmbedding', num_channels=3),
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=8),
        grid=(8, 8),
        drop_rate=0.1,
    ),
    decoder=dict(
        type='aft_mm.SequenceDecoder',
        embed_dims=256,
        num_layers=32,
        embedding=dict(type='aft_mm.PixelEmbedding', num_channels=3),
        grid=(32, 32),
        cross_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=8),
        drop_rate=0.1,
    ),
    head=dict(type='aft_mm.LogisticMixtureHead', embed_dims=256, num_channels=3, num_components=10),
)
