_base_ = './aft-local2d-hard-l32-d256_8xb16-200e_celeba-8to32.py'

# No attention at all: the input's pixels are weighed by their keys alone, and the query gates them.
model = dict(decoder=dict(cross_mixer=dict(_delete_=True, type='aft_mm.AFTSimple')))
