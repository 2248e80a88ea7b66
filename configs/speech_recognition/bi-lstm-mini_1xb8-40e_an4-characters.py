_base_ = './transformer-mini_1xb8-40e_an4-characters.py'

# As many weights as the others have.
model = dict(
    encoder=dict(
        _delete_=True,
        type='aft_mm.BiLSTMEncoder',
        num_features=39,
        hidden_dims=104,
        num_layers=3,
    ),
    head=dict(embed_dims=208),
)
