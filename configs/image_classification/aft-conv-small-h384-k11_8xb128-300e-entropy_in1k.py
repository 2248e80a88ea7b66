_base_ = './aft-conv-small-h384-k11_8xb128-300e_in1k.py'

# Section 8, eq. 9: the entropy of softmax(w) over the kernel is added to the loss with weight
# 0.001.
model = dict(backbone=dict(token_mixer=dict(sparsity='entropy')))

# A list replaces the inherited one.
custom_hooks = [
    dict(
        type='EMAHook',
        momentum=4e-5,
        evaluate_on_ema=False,
        evaluate_on_origin=True,
        priority='ABOVE_NORMAL',
    ),
    dict(type='aft_mm.RegularizationHook', weight=0.001),
]
