_base_ = './aft-conv-base-h32-k25_8xb8-100e_in1k-384px.py'

# Table 8: starts from the weights of DeiT-base at 384 px, but for its position embedding, class
# token, queries and keys. tools/model_converters/deit_to_aft.py makes this file of DeiT's checkpoint.
load_from = 'checkpoints/aft-conv-base-h32-k25_from-deit_in1k-384px.pth'
