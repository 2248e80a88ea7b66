_base_ = [
    '../_base_/models/ar_bytes.py',
    '../_base_/datasets/enwik8.py',
    '../_base_/schedules/ar_100e.py',
    '../_base_/ar_runtime.py',
]

# The rounds are our choice, buckets and chunks those of arXiv 2006.16236, §4. Fewer pairs and a
# lower recall than in the paper, see docs/mixers.md#recall-of-lsh.
model = dict(
    decoder=dict(
        embed_dims=512,
        num_layers=12,
        token_mixer=dict(
            type='aft_mm.LSHAttention', num_heads=8, num_rounds=4, num_buckets=64, chunk_size=32
        ),
    ),
    head=dict(embed_dims=512),
)

train_dataloader = dict(batch_size=16)
