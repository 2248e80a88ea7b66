_base_ = './aft-conv-mini-h96-k7_1xb50-40e_imagenette-64px.py'

# The entropy of softmax(w) over the kernel is added to the loss with weight 0.001.
model = dict(backbone=dict(token_mixer=dict(sparsity='entropy')))
custom_hooks = [dict(type='aft_mm.RegularizationHook', weight=0.001)]
