_base_ = [
    '../_base_/models/translation.py',
    '../_base_/datasets/wmt14_en_de.py',
    '../_base_/schedules/translation_200k.py',
    '../_base_/ar_runtime.py',
]

model = dict(decoder=dict(token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=8)))

train_dataloader = dict(batch_size=4096)

# All is counted in updates.
default_hooks = dict(
    logger=dict(log_metric_by_epoch=False), checkpoint=dict(by_epoch=False, interval=10000)
)
log_processor = dict(by_epoch=False)
