# Multi30k, task 1: <folder>/train.de, train.en, val.* and test_2016_flickr.*, plain or gzip.
# Translator and `aft_mm translate` read the entry `subwords`.
folder = '{{$AFT_MM_DATA:data}}/multi30k'
subwords = folder + '/subwords.model'

# batch_size counts tokens.
train_dataloader = dict(
    num_workers=0,
    persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=True),
    batch_sampler=dict(type='aft_mm.TokenBatchSampler'),
    dataset=dict(
        type='aft_mm.ParallelText',
        source_file=folder + '/train.de',
        target_file=folder + '/train.en',
        subwords=subwords,
        max_length=64,
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
        source_file=folder + '/val.de',
        target_file=folder + '/val.en',
        subwords=subwords,
        max_length=64,
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
        source_file=folder + '/test_2016_flickr.de',
        target_file=folder + '/test_2016_flickr.en',
        subwords=subwords,
        max_length=64,
        test_mode=True,
    ),
)
test_evaluator = [dict(type='aft_mm.Likelihood', per='subword'), dict(type='aft_mm.BLEU')]
