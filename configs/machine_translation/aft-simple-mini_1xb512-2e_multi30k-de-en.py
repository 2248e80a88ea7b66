# German to English on Multi30k. AFT-simple: perplexity per subword 12.70, BLEU 24.0.
#     aft_mm train aft-simple-mini_1xb512-2e_multi30k-de-en
_base_ = './transformer-mini_1xb512-2e_multi30k-de-en.py'

model = dict(decoder=dict(token_mixer=dict(_delete_=True, type='aft_mm.AFTSimple')))
