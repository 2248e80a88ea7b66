_base_ = [
    '../_base_/models/translation.py',
    '../_base_/datasets/multi30k_de_en.py',
    '../_base_/schedules/translation_mini.py',
    '../_base_/ar_runtime.py',
]

# Two layers of 128 channels and 3,000 subwords, for a CPU; the mini configs differ in the self-attention
# of the decoder only.
model = dict(
    encoder=dict(
        embed_dims=128, num_layers=2, mlp_ratio=2.0, grid=(64,), token_mixer=dict(num_heads=4)
    ),
    decoder=dict(
        embed_dims=128,
        num_layers=2,
        mlp_ratio=2.0,
        embedding=dict(vocab_size=3000),
        grid=(64,),
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=4),
        cross_mixer=dict(num_heads=4),
    ),
    head=dict(embed_dims=128, num_classes=3000),
)

train_dataloader = dict(batch_size=512)
train_cfg = dict(max_epochs=15)
