# The copy task of arXiv 2006.16236, §4.1.1: 4 layers, 10 symbols and a separator, sequences of up
# to 128 tokens. Width and no dropout are our choices.
model = dict(
    type='aft_mm.AutoregressiveModel',
    decoder=dict(
        type='aft_mm.SequenceDecoder',
        embed_dims=256,
        num_layers=4,
        embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=11),
        grid=(128,),
    ),
    head=dict(type='aft_mm.CategoricalHead', embed_dims=256, num_classes=11),
)
