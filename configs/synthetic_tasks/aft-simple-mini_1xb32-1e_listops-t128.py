_base_ = './transformer-mini_1xb32-1e_listops-t128.py'

model = dict(
    decoder=dict(
        token_mixer=dict(_delete_=True, type='aft_mm.AFTSimple'),
    )
)
