_base_ = './transformer-mini_1xb8-25e_an4-phonemes.py'

# As many weights as the others have.
model = dict(
    encoder=dict(
        _delete_=True,
        type='aft_mm.BiLSTMEncoder',
        num_features=39,
        hidden_dims=90,
        num_layers=3,
        drop_rate=0.1,
    ),
    head=dict(embed_dims=180),
)
