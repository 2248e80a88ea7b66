_base_ = [
    '../_base_/models/ctc_encoder.py',
    '../_base_/datasets/an4_phonemes.py',
    '../_base_/schedules/ctc_mini.py',
    '../_base_/ar_runtime.py',
]

# Four layers for a CPU; the longest utterance has 210 stacks of 3 frames.
model = dict(
    encoder=dict(
        embed_dims=96,
        num_layers=4,
        embedding=dict(num_features=39),
        grid=(256,),
        drop_rate=0.1,
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=4),
    ),
    head=dict(embed_dims=96),
)

train_dataloader = dict(batch_size=8)
train_cfg = dict(max_epochs=25, val_interval=5)
