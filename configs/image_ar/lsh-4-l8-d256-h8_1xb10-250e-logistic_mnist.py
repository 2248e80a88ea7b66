_base_ = '../_base_/recipes/1xb10-250e-logistic_mnist.py'

# Fewer pairs and a lower recall than in the paper, see docs/mixers.md#recall-of-lsh.
model = dict(
    decoder=dict(
        token_mixer=dict(
            type='aft_mm.LSHAttention', num_heads=8, num_rounds=4, num_buckets=64, chunk_size=32
        )
    )
)
