_base_ = './aft-local2d-hard-l32-d256_8xb16-200e_celeba-8to32.py'

# W = 1 for the 256 pixels up to a pixel, in raster order. Ours: the paper has the 2-d window only.
model = dict(decoder=dict(grid=(32 * 32,), token_mixer=dict(window=256)))
