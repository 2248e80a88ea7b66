# AFT-conv on enwik8 whose heads start at the nearest bytes: 2.292 bits per character.
#     aft_mm train aft-conv-mini-h4-k31_1xb16-8e-peak_enwik8-t256 --amp
_base_ = './aft-local-32-mini_1xb16-6e_enwik8-t256.py'

model = dict(
    decoder=dict(
        mlp_ratio=574 / 128,
        token_mixer=dict(
            _delete_=True, type='aft_mm.AFTConv', num_heads=4, kernel_size=31, init_peak=6
        ),
    )
)
train_cfg = dict(max_epochs=8)
