_base_ = [
    '../_base_/models/ar_logistic.py',
    '../_base_/datasets/mnist_ar.py',
    '../_base_/schedules/ar_radam_250e.py',
    '../_base_/ar_runtime.py',
]

# Fewer pairs and a lower recall than in the paper, see docs/mixers.md#recall-of-lsh.
model = dict(
    decoder=dict(
        token_mixer=dict(
            type='aft_mm.LSHAttention', num_heads=8, num_rounds=1, num_buckets=64, chunk_size=32
        )
    )
)

train_dataloader = dict(batch_size=10)
