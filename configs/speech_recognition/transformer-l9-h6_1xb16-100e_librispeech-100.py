_base_ = [
    '../_base_/models/ctc_encoder.py',
    '../_base_/datasets/librispeech_100.py',
    '../_base_/schedules/ctc_radam_plateau.py',
    '../_base_/ar_runtime.py',
]

# As for the Wall Street Journal, with characters and longer utterances.
model = dict(
    encoder=dict(grid=(3600,), token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=6)),
    head=dict(num_classes=30),
)

train_dataloader = dict(batch_size=16)
param_scheduler = [
    dict(
        type='ReduceOnPlateauLR',
        monitor='character_error_rate',
        rule='less',
        factor=0.5,
        patience=3,
        min_value=1e-6,
    )
]
