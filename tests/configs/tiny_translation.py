# A translation model with one small encoder and decoder block on train.de, train.en, val.* and
# subwords.model in the working directory.
_base_ = './tiny_runtime.py'
subwords = 'subwords.model'

model = dict(
    type='aft_mm.AutoregressiveModel',
    encoder=dict(
        type='aft_mm.SequenceEncoder',
        embed_dims=16,
        num_layers=1,
        embedding=None,
        positions='sinusoidal',
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=2),
        grid=(48,),
        drop_rate=0.1,
    ),
    decoder=dict(
        type='aft_mm.SequenceDecoder',
        embed_dims=16,
        num_layers=1,
        embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=64, scaled=True),
        positions='sinusoidal',
        token_mixer=dict(type='aft_mm.AFTLocal', window=4, rank=4),
        cross_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=2),
        grid=(48,),
        drop_rate=0.1,
    ),
    head=dict(
        type='aft_mm.CategoricalHead', embed_dims=16, num_classes=64, tied=True, label_smoothing=0.1
    ),
)

train_dataloader = dict(
    batch_size=320,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=True),
    batch_sampler=dict(type='aft_mm.TokenBatchSampler'),
    dataset=dict(
        type='aft_mm.ParallelText',
        source_file='train.de',
        target_file='train.en',
        subwords=subwords,
        max_length=48,
    ),
)
val_dataloader = dict(
    batch_size=5,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.ParallelText',
        source_file='val.de',
        target_file='val.en',
        subwords=subwords,
        max_length=48,
        test_mode=True,
    ),
)
val_evaluator = dict(type='aft_mm.Likelihood', per='subword')
test_dataloader = val_dataloader
test_evaluator = [dict(type='aft_mm.Likelihood', per='subword'), dict(type='aft_mm.BLEU')]

train_cfg = dict(val_interval=3)
test_cfg = dict(type='aft_mm.TranslationTestLoop', beam_size=3, length_penalty=2.0)
optim_wrapper = dict(optimizer=dict(type='Adam', lr=3e-3), clip_grad=dict(max_norm=1.0))
param_scheduler = [dict(type='CosineAnnealingLR', T_max=3, convert_to_iter_based=True)]

default_hooks = dict(
    logger=dict(interval=5),
    first_sample=dict(type='aft_mm.SanityCheckHook'),
    finite_loss=dict(type='aft_mm.FiniteLossHook'),
)
