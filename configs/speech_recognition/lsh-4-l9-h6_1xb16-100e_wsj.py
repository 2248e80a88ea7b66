_base_ = '../_base_/recipes/1xb16-100e_wsj.py'

# 64 buckets and chunks of 32 as in the paper's other experiments. The encoder is not causal, so
# chunks are Reformer's.
model = dict(
    encoder=dict(
        token_mixer=dict(
            type='aft_mm.LSHAttention', num_heads=6, num_rounds=4, num_buckets=64, chunk_size=32
        )
    )
)
