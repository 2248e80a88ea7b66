# German to English on Multi30k. Softmax attention: perplexity per subword 12.05, BLEU 25.4.
#     aft_mm train transformer-mini_1xb512-2e_multi30k-de-en
_base_ = [
    '../_base_/models/translation.py',
    '../_base_/datasets/multi30k_de_en.py',
    '../_base_/schedules/translation_mini.py',
    '../_base_/ar_runtime.py',
]

# Two layers of 128 channels and 3,000 subwords, for a CPU; the mini configs differ in the self-attention
# of the decoder only.
model = dict(
    encoder=dict(embed_dims=128, num_layers=2, grid=(64,), token_mixer=dict(num_heads=4)),
    decoder=dict(
        embed_dims=128,
        num_layers=2,
        embedding=dict(vocab_size=3000),
        grid=(64,),
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=4),
        cross_mixer=dict(num_heads=4),
    ),
    head=dict(embed_dims=128, num_classes=3000),
)

train_dataloader = dict(batch_size=512)
train_cfg = dict(max_epochs=2)
