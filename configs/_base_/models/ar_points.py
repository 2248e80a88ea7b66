# 2,048 points as 6,144 coordinates z, y, x, 8 bits each, as in the ICLR submission. Our choices:
# one vector per point, one per kind of coordinate, one per value; L = 24, d = 256 and dropout of
# its CIFAR-10 models.
model = dict(
    type='aft_mm.AutoregressiveModel',
    decoder=dict(
        type='aft_mm.SequenceDecoder',
        embed_dims=256,
        num_layers=24,
        embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=256, num_kinds=3),
        grid=(2048 * 3,),
        tokens_per_position=3,
        drop_rate=0.1,
    ),
    head=dict(type='aft_mm.CategoricalHead', embed_dims=256, num_classes=256),
)
