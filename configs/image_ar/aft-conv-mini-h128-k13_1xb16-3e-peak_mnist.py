# AFT-conv on MNIST, pixel by pixel, 50,000 training images: 0.725 bits per dim.
#     aft_mm train aft-conv-mini-h128-k13_1xb16-3e-peak_mnist --amp
_base_ = './aft-local-32-mini_1xb16-2e_mnist.py'

# Each head starts at one of the nearest pixels, as a first convolution would.
model = dict(
    decoder=dict(
        grid=(28, 28),
        token_mixer=dict(
            _delete_=True, type='aft_mm.AFTConv', num_heads=128, kernel_size=13, init_peak=3
        ),
    )
)

train_dataloader = dict(dataset=dict(indices=None))
train_cfg = dict(max_epochs=3)
