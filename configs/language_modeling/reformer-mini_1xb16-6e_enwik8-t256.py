_base_ = './aft-local-32-mini_1xb16-6e_enwik8-t256.py'

# An MLP of 576 channels, for equal parameters.
model = dict(
    decoder=dict(
        mlp_ratio=4.5,
        token_mixer=dict(
            _delete_=True,
            type='aft_mm.LSHAttention',
            num_heads=4,
            num_rounds=4,
            num_buckets=16,
            chunk_size=16,
        ),
    )
)
