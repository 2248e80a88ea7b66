# The speech recogniser of arXiv 2006.16236, §4.3: 9 layers, 6 heads of 32 channels, CTC over
# phonemes, 40 filter banks of 2,400 frames at most. Learned positions are our choice.
model = dict(
    type='aft_mm.CTCModel',
    encoder=dict(
        type='aft_mm.SequenceEncoder',
        embed_dims=192,
        num_layers=9,
        embedding=dict(type='aft_mm.FrameEmbedding', num_features=40),
        grid=(2400,),
    ),
    head=dict(type='aft_mm.CTCHead', embed_dims=192, num_classes=41),
)
