_base_ = [
    '../_base_/models/ctc_encoder.py',
    '../_base_/datasets/wsj.py',
    '../_base_/schedules/ctc_radam_plateau.py',
    '../_base_/ar_runtime.py',
]

# 64 buckets and chunks of 32 as in the paper's other experiments. The encoder is not causal, so
# chunks are Reformer's.
model = dict(
    encoder=dict(
        token_mixer=dict(
            type='aft_mm.LSHAttention', num_heads=6, num_rounds=4, num_buckets=64, chunk_size=32
        )
    )
)

train_dataloader = dict(batch_size=16)
