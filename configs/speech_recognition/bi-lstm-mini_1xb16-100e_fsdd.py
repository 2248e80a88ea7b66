_base_ = './transformer-mini_1xb16-100e_fsdd.py'

# As many weights as the others have.
model = dict(
    encoder=dict(
        _delete_=True,
        type='aft_mm.BiLSTMEncoder',
        num_features=120,
        hidden_dims=67,
        num_layers=3,
    ),
    head=dict(embed_dims=134),
)
