_base_ = './transformer-base_8xb4096-200k_wmt14-en-de.py'

# Ours: the window of the language models.
model = dict(
    decoder=dict(token_mixer=dict(_delete_=True, type='aft_mm.AFTLocal', window=32, rank=64))
)
