_base_ = '../_base_/recipes/7d-logistic_cifar10.py'

# Fewer pairs and a lower recall than in the paper, see docs/mixers.md#recall-of-lsh.
model = dict(
    decoder=dict(
        num_layers=16,
        grid=(32 * 32 * 3,),
        token_mixer=dict(
            type='aft_mm.LSHAttention', num_heads=8, num_rounds=4, num_buckets=64, chunk_size=32
        ),
    )
)
