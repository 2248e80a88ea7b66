# Small translation models: OpenNMT's Adam, a warm-up of 400 iterations and a cosine schedule; the
# config sets the number of epochs. The rate ends at a twentieth of its peak, so that the averaged
# checkpoints differ.
optim_wrapper = dict(
    optimizer=dict(type='Adam', lr=3e-3, betas=(0.9, 0.998), fused=True),
    clip_grad=dict(max_norm=1.0),
)

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-2, begin=0, end=400, by_epoch=False),
    dict(type='CosineAnnealingLR', eta_min_ratio=0.05, begin=0, convert_to_iter_based=True),
]

train_cfg = dict(by_epoch=True, val_interval=1)
val_cfg = dict()
test_cfg = dict(type='aft_mm.TranslationTestLoop', beam_size=4, length_penalty=1.0)
