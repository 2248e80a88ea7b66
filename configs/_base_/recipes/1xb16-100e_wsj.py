_base_ = [
    '../models/ctc_encoder.py',
    '../datasets/wsj.py',
    '../schedules/ctc_radam_plateau.py',
    '../ar_runtime.py',
]

train_dataloader = dict(batch_size=16)
