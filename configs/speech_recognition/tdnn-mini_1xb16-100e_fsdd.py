_base_ = './transformer-mini_1xb16-100e_fsdd.py'

# Three convolutions with batch norm see 87 frames; as many weights as the others have.
model = dict(
    encoder=dict(
        _delete_=True,
        type='aft_mm.TDNNEncoder',
        num_features=120,
        embed_dims=152,
    ),
    head=dict(embed_dims=152),
)
