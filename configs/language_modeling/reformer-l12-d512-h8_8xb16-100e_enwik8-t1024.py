_base_ = [
    '../_base_/models/ar_bytes.py',
    '../_base_/datasets/enwik8.py',
    '../_base_/schedules/ar_100e.py',
    '../_base_/ar_runtime.py',
]

# The papers give no number of rounds; buckets and chunks are those of arXiv 2006.16236, §4.
# A token sees the last 32 tokens of its bucket, not Reformer's chunks, and the rotations are sampled
# once: fewer pairs and a lower recall than in the paper, see docs/mixers.md#recall-of-lsh.
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
