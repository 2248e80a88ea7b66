# WMT14 English-German by `aft_mm convert wmt14`: <folder>/train.en, train.de, val.*
# (newstest2013) and test.* (newstest2014), plain or gzip. Translator and `aft_mm translate` read
# the entry `subwords`.
folder = '{{$AFT_MM_DATA:data}}/wmt14_en_de'
subwords = folder + '/subwords.model'

# batch_size counts tokens.
train_dataloader = dict(
    num_workers=4,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=True),
    batch_sampler=dict(type='aft_mm.TokenBatchSampler'),
    dataset=dict(
        type='aft_mm.ParallelText',
        source_file=folder + '/train.en',
        target_file=folder + '/train.de',
        subwords=subwords,
        max_length=256,
        # Encoded by one process of the node.
        cache_dir=folder + '/cache',
    ),
)

# Sentences are tested in their own order.
val_dataloader = dict(
    batch_size=64,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.ParallelText',
        source_file=folder + '/val.en',
        target_file=folder + '/val.de',
        subwords=subwords,
        max_length=256,
        test_mode=True,
    ),
)
val_evaluator = dict(type='aft_mm.Likelihood', per='subword')

test_dataloader = dict(
    batch_size=64,
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.ParallelText',
        source_file=folder + '/test.en',
        target_file=folder + '/test.de',
        subwords=subwords,
        max_length=256,
        test_mode=True,
    ),
)
test_evaluator = [dict(type='aft_mm.Likelihood', per='subword'), dict(type='aft_mm.BLEU')]
