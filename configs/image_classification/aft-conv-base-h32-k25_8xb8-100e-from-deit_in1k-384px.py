_base_ = './aft-conv-base-h32-k25_8xb8-100e_in1k-384px.py'

# Table 8: DeiT-base at 384 px without position embedding, class token, queries and keys, by
# `aft_mm convert deit`.
load_from = 'checkpoints/aft-conv-base-h32-k25_from-deit_in1k-384px.pth'
