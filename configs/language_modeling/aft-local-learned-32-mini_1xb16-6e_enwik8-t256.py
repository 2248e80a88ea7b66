_base_ = './aft-local-32-mini_1xb16-6e_enwik8-t256.py'

# An MLP of 384 channels, for equal parameters.
model = dict(
    decoder=dict(
        mlp_ratio=3.0,
        token_mixer=dict(_delete_=True, type='aft_mm.AFTLocalLearned', window=32, rank=64),
    )
)
