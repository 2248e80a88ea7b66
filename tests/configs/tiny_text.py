# A language model with two small blocks on the 4,000 bytes of text.txt in the working directory.
default_scope = 'aft_mm'
custom_imports = dict(imports=['aft_mm.registry', 'recording_hooks'], allow_failed_imports=False)

model = dict(
    type='AutoregressiveModel',
    decoder=dict(
        type='aft_mm.SequenceDecoder',
        embed_dims=16,
        num_layers=2,
        embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=256),
        token_mixer=dict(type='aft_mm.AFTLocal', window=5, rank=4),
        grid=(32,),
        drop_rate=0.1,
    ),
    head=dict(type='aft_mm.CategoricalHead', embed_dims=16, num_classes=256),
)

train_dataloader = dict(
    batch_size=16,
    num_workers=1,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='aft_mm.TextFile',
        data_file='text.txt',
        split='train',
        context_length=32,
        samples_per_epoch=96,
    ),
)
val_dataloader = dict(
    batch_size=8,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.TextFile',
        data_file='text.txt',
        split='val',
        context_length=32,
        evaluation='strided',
        stride=15,
    ),
)  # 13 contexts, an odd number for two processes
val_evaluator = dict(type='aft_mm.Likelihood', per='char')
test_dataloader = val_dataloader
test_evaluator = val_evaluator

train_cfg = dict(by_epoch=True, max_epochs=3, val_interval=1)
val_cfg = dict()
test_cfg = dict()
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=3e-3), clip_grad=dict(max_norm=1.0))
param_scheduler = [dict(type='CosineAnnealingLR', T_max=3, convert_to_iter_based=True)]

default_hooks = dict(
    logger=dict(type='LoggerHook', interval=2),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(
        type='aft_mm.SafeCheckpointHook', interval=1, save_best='bits_per_char', rule='less'
    ),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    exact_resume=dict(type='aft_mm.ExactResumeHook'),
    check_images=dict(type='aft_mm.CheckImagesHook'),
    finite_loss=dict(type='aft_mm.FiniteLossHook'),
    first_sample=dict(type='aft_mm.SanityCheckHook'),
    losses=dict(type='RecordLossHook'),
    kill=dict(type='KillHook'),
)
custom_hooks = [dict(type='EMAHook', momentum=0.1)]
vis_backends = [dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]
visualizer = dict(type='Visualizer', vis_backends=vis_backends)
randomness = dict(seed=0)
