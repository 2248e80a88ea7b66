_base_ = './transformer-mini_1xb16-100e_fsdd.py'

# As many weights as the others have.
model = dict(
    encoder=dict(
        _delete_=True,
        type='aft_mm.ConformerEncoder',
        num_features=120,
        embed_dims=81,
        num_layers=2,
        num_heads=3,
    ),
    head=dict(embed_dims=81),
)
