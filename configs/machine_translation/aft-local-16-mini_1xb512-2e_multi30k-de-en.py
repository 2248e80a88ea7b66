# German to English on Multi30k. AFT-local-16: perplexity per subword 12.06, BLEU 24.3.
#     aft_mm train aft-local-16-mini_1xb512-2e_multi30k-de-en
_base_ = './transformer-mini_1xb512-2e_multi30k-de-en.py'

model = dict(
    decoder=dict(token_mixer=dict(_delete_=True, type='aft_mm.AFTLocal', window=16, rank=16))
)
