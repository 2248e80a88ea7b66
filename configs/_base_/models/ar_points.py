# 2,048 points as 6,144 coordinates z, y, x of 8 bits, as in table 7 of the ICLR submission. It says
# no more of its model. Ours has one vector per point of the sequence, shared by its three
# coordinates, one per kind of coordinate and one per value, and the L = 24, d = 256 and dropout of
# the submission's CIFAR-10 models; the leaves choose the token mixer.
model = dict(
    type='aft_mm.AutoregressiveModel',
    decoder=dict(
        type='aft_mm.SequenceDecoder',
        embed_dims=256,
        num_layers=24,
        embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=256, num_kinds=3),
        grid=(2048 * 3, ),
        tokens_per_position=3,
        drop_rate=0.1),
    head=dict(type='aft_mm.CategoricalHead', embed_dims=256, num_classes=256))
