# One epoch with a compiled backbone; the learning rate is given for a batch of 32.
_base_ = './tiny.py'

train_cfg = dict(max_epochs=1)
default_hooks = dict(compile=dict(type='aft_mm.CompileHook', backend='eager'))
