# AFT-local2d-hard on MNIST, pixel by pixel: 1.011 bits per dim.
#     aft_mm train aft-local2d-hard-mini_1xb16-2e_mnist --amp
_base_ = './aft-local-32-mini_1xb16-2e_mnist.py'

# W = 1 in a block of 4 x 4 pixels that ends at the target and in one above to the right, else 0.
model = dict(
    decoder=dict(
        grid=(28, 28), token_mixer=dict(_delete_=True, type='aft_mm.AFTLocalHard', window=(8, 8))
    )
)
