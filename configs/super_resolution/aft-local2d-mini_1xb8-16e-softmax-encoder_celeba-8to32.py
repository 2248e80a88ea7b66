_base_ = './aft-local2d-mini_1xb8-16e_celeba-8to32.py'

# Encoder and cross mixer are softmax attention of 8 heads, as in the paper.
model = dict(
    encoder=dict(token_mixer=dict(_delete_=True, type='aft_mm.SoftmaxAttention', num_heads=8)),
    decoder=dict(cross_mixer=dict(_delete_=True, type='aft_mm.SoftmaxAttention', num_heads=8)),
)
