# OpenNMT-py's recipe of the base Transformer: Adam with betas 0.9 and 0.998, warm-up over 8,000
# updates, then the inverse square root, 2 * 512^-0.5 * 8000^-0.5 = 9.88e-4 at the peak; 200,000
# updates of 8 x 4,096 tokens. Beam and length penalty are those of arXiv 1706.03762.
optim_wrapper = dict(optimizer=dict(type='Adam', lr=9.88e-4, betas=(0.9, 0.998), eps=1e-9))

param_scheduler = [
    dict(type='LinearLR', start_factor=1 / 8000, begin=0, end=8000, by_epoch=False),
    dict(type='aft_mm.InverseSqrtLR', begin=8000, by_epoch=False),
]

train_cfg = dict(by_epoch=False, max_iters=200000, val_interval=10000)
val_cfg = dict()
test_cfg = dict(type='aft_mm.TranslationTestLoop', beam_size=4, length_penalty=0.6)
