_base_ = './aft-local-32-mini_1xb16-6e_enwik8-t256.py'

# The recurrent baseline. An MLP of 191 channels, for equal parameters.
model = dict(decoder=dict(mlp_ratio=191 / 128, token_mixer=dict(_delete_=True, type='aft_mm.LSTM')))
