# A language model with two small blocks on the 4,000 bytes of text.txt in the working directory.
_base_ = './tiny_runtime.py'

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

optim_wrapper = dict(optimizer=dict(type='AdamW', lr=3e-3), clip_grad=dict(max_norm=1.0))
param_scheduler = [dict(type='CosineAnnealingLR', T_max=3, convert_to_iter_based=True)]

default_hooks = dict(
    checkpoint=dict(save_best='bits_per_char', rule='less'),
    check_images=dict(type='aft_mm.CheckImagesHook'),
    finite_loss=dict(type='aft_mm.FiniteLossHook'),
    first_sample=dict(type='aft_mm.SanityCheckHook'),
)
custom_hooks = [dict(type='EMAHook', momentum=0.1)]
vis_backends = [dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]
visualizer = dict(vis_backends=vis_backends)
