# An AFT-conv classifier of two small blocks on 96 digits.
_base_ = './tiny_runtime.py'
default_scope = 'mmpretrain'

model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='aft_mm.AFTViT',
        arch=dict(embed_dims=16, num_layers=2),
        img_size=8,
        patch_size=2,
        in_channels=1,
        token_mixer=dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=3),
        drop_path_rate=0.2,
        out_type='avg_featmap',
    ),
    head=dict(type='LinearClsHead', num_classes=10, in_channels=16),
)
data_preprocessor = dict(num_classes=10, mean=[77.9], std=[95.9], to_rgb=False)

train_dataloader = dict(
    batch_size=16,
    num_workers=1,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='aft_mm.Digits',
        split='train',
        indices=96,
        pipeline=[dict(type='RandomCrop', crop_size=8, padding=1), dict(type='PackInputs')],
    ),
)
# 65 is not a multiple of the number of processes.
val_dataloader = dict(
    batch_size=32,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='aft_mm.Digits', split='test', indices=65, pipeline=[dict(type='PackInputs')]
    ),
)
val_evaluator = dict(type='Accuracy', topk=(1,))
test_dataloader = val_dataloader
test_evaluator = val_evaluator
tta_model = dict(type='AverageClsScoreTTA')
tta_pipeline = [
    dict(
        type='TestTimeAug',
        transforms=[
            [dict(type='RandomFlip', prob=0.0), dict(type='RandomFlip', prob=1.0)],
            [dict(type='PackInputs')],
        ],
    )
]

auto_scale_lr = dict(base_batch_size=32)
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=3e-3, weight_decay=0.05), clip_grad=dict(max_norm=1.0)
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=4),
    dict(type='CosineAnnealingLR', T_max=3, convert_to_iter_based=True),
]

default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    checkpoint=dict(save_best='auto'),
    check_images=dict(type='aft_mm.CheckImagesHook'),
)
custom_hooks = [dict(type='EMAHook', momentum=0.1)]
visualizer = dict(type='UniversalVisualizer')
