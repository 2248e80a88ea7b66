_base_ = './transformer-mini_1xb8-25e_an4-phonemes.py'

model = dict(
    encoder=dict(
        token_mixer=dict(_delete_=True, type='aft_mm.AFTConv', num_heads=8, kernel_size=15)
    ),
    head=dict(num_classes=29),
)

# Transcripts are spelled, so that words can be counted.
units = dict(_delete_=True, symbols=' ABCDEFGHIJKLMNOPQRSTUVWXYZ')
train_dataloader = dict(dataset=dict(units=units))
val_dataloader = dict(dataset=dict(units=units))
val_evaluator = [
    dict(type='aft_mm.ErrorRate', per='character'),
    dict(type='aft_mm.ErrorRate', per='word'),
]
test_dataloader = dict(dataset=dict(units=units))
test_evaluator = val_evaluator
