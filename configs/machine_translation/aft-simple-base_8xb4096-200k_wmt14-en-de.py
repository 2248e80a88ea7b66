_base_ = './transformer-base_8xb4096-200k_wmt14-en-de.py'

# The sigmoid-softmax AFT of the ICLR submission.
model = dict(decoder=dict(token_mixer=dict(_delete_=True, type='aft_mm.AFTSimple')))
