_base_ = [
    '../_base_/models/ctc_encoder.py',
    '../_base_/datasets/wsj.py',
    '../_base_/schedules/ctc_radam_plateau.py',
    '../_base_/ar_runtime.py',
]

model = dict(encoder=dict(token_mixer=dict(type='aft_mm.AFTSimple')))

train_dataloader = dict(batch_size=16)
