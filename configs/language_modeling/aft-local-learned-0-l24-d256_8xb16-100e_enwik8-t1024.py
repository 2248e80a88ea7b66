_base_ = './aft-local-learned-32-l24-d256_8xb16-100e_enwik8-t1024.py'

# Every visible token has the same weight: AFT-simple over their number.
model = dict(decoder=dict(token_mixer=dict(window=0)))
