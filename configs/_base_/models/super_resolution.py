# 8 x 8 pixels to 32 x 32: an encoder over the low resolution, a decoder over the raster of the high
# one, whole pixels from a mixture of logistics. L = 32, d = 256. The configs choose the token mixer of
# the decoder, the only one that the paper replaces: the input is read by softmax attention of 8 heads.
# The depth of the encoder, dropout and the size of the mixture the paper does not say: 4, 0.1 and 10
# are choices of this project.
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
