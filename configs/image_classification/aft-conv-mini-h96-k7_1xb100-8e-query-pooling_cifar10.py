# AFT-conv with one learned query over the tokens in place of their mean.
#     aft_mm train aft-conv-mini-h96-k7_1xb100-8e-query-pooling_cifar10
_base_ = './aft-conv-mini-h96-k7_1xb100-8e_cifar10.py'

model = dict(backbone=dict(out_type='query_pooling'))
