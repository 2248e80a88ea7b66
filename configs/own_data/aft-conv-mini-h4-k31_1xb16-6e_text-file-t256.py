# Any file as a sequence of bytes, plain or gzip: 90 % train, then 5 % validate, then 5 % test.
_base_ = [
    '../_base_/models/ar_bytes.py',
    '../_base_/datasets/enwik8.py',
    '../_base_/schedules/ar_mini.py',
    '../_base_/ar_runtime.py',
]

data_file = '{{$AFT_MM_DATA:data}}/my_text.txt'

model = dict(
    decoder=dict(
        embed_dims=128,
        num_layers=4,
        grid=(256,),
        drop_rate=0.0,
        # Each head starts at one of the nearest bytes.
        token_mixer=dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=31, init_peak=6),
    ),
    head=dict(embed_dims=128),
)

train_dataloader = dict(
    batch_size=16, dataset=dict(data_file=data_file, context_length=256, samples_per_epoch=8000)
)
val_dataloader = dict(batch_size=64, dataset=dict(data_file=data_file, context_length=256))
test_dataloader = dict(batch_size=64, dataset=dict(data_file=data_file, context_length=256))
train_cfg = dict(max_epochs=6)
