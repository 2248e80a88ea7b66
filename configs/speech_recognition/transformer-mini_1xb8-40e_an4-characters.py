# AN4 in characters, two layers behind three convolutions.
_base_ = [
    '../_base_/models/ctc_encoder.py',
    '../_base_/datasets/an4_characters.py',
    '../_base_/schedules/ctc_mini.py',
    '../_base_/ar_runtime.py',
]

# A convolution sees five stacks of 3 frames; the longest utterance has 210 stacks.
model = dict(
    lexicon=dict(units={{_base_.units}}, words={{_base_.words}}),
    encoder=dict(
        embed_dims=128,
        num_layers=2,
        grid=(256,),
        embedding=dict(
            type='aft_mm.ConvFrameEmbedding', num_features=39, num_layers=3, kernel_size=5
        ),
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=4),
    ),
    head=dict(embed_dims=128, num_classes=29),
)

train_dataloader = dict(batch_size=8)
train_cfg = dict(max_epochs=40, val_interval=20)
default_hooks = dict(checkpoint=dict(interval=20))
