_base_ = './image-transformer-local1d-l12-d512-h8_8xb16-200e_celeba-8to32.py'

# Blocks of 16 x 16 pixels that also see 16 rows above and 16 columns on both sides.
model = dict(decoder=dict(grid=(32, 32), token_mixer=dict(window=(16, 16))))
