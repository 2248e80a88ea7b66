_base_ = [
    '../_base_/models/ar_copy.py',
    '../_base_/datasets/copy_task.py',
    '../_base_/schedules/ar_radam_copy.py',
    '../_base_/ar_runtime.py',
]

# Fewer pairs and a lower recall than in the paper, see docs/mixers.md#recall-of-lsh.
model = dict(
    decoder=dict(
        token_mixer=dict(
            type='aft_mm.LSHAttention', num_heads=8, num_rounds=4, num_buckets=8, chunk_size=32
        )
    )
)

train_dataloader = dict(batch_size=64)
