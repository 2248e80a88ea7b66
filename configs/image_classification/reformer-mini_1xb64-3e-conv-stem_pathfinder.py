_base_ = './deit-mini_1xb64-3e-conv-stem_pathfinder.py'

# An MLP of 160 channels, for equal parameters.
model = dict(
    backbone=dict(
        arch=dict(mlp_ratio=160 / 64),
        token_mixer=dict(
            _delete_=True,
            type='aft_mm.LSHAttention',
            num_heads=4,
            num_rounds=4,
            num_buckets=8,
            chunk_size=8,
        ),
    )
)
