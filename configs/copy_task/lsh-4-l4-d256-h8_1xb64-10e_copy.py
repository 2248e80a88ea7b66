_base_ = [
    '../_base_/models/ar_copy.py',
    '../_base_/datasets/copy_task.py',
    '../_base_/schedules/ar_radam_copy.py',
    '../_base_/ar_runtime.py',
]

# A token sees the last 32 tokens of its bucket, not Reformer's chunks, and the rotations are sampled
# once: fewer pairs and a lower recall than in the paper, see docs/mixers.md#recall-of-lsh.
model = dict(
    decoder=dict(
        token_mixer=dict(
            type='aft_mm.LSHAttention', num_heads=8, num_rounds=4, num_buckets=8, chunk_size=32
        )
    )
)

train_dataloader = dict(batch_size=64)
