# 8 x 8 pixels to 32 x 32: an encoder over the low resolution, a decoder over the raster of the high
# one, whole pixels from a mixture of 10 logistics. L = 32, d = 256; the leaves choose the token mixers.
model = dict(
    type='aft_mm.AutoregressiveModel',
    encoder=dict(
        type='aft_mm.SequenceEncoder',
        embed_dims=256,
        num_layers=4,
        embedding=dict(type='aft_mm.PixelEmbedding', num_channels=3),
        grid=(8, 8),
        drop_rate=0.1),
    decoder=dict(
        type='aft_mm.SequenceDecoder',
        embed_dims=256,
        num_layers=32,
        embedding=dict(type='aft_mm.PixelEmbedding', num_channels=3),
        grid=(32, 32),
        cross_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=4),
        drop_rate=0.1),
    head=dict(
        type='aft_mm.LogisticMixtureHead', embed_dims=256, num_channels=3, num_components=10))
