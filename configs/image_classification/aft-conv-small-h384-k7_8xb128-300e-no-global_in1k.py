_base_ = './aft-conv-small-h384-k11_8xb128-300e_in1k.py'

# Section 5.3: W = 0 instead of 1 outside the kernel.
model = dict(backbone=dict(token_mixer=dict(kernel_size=7, global_connectivity=False)))
