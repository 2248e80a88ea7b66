_base_ = [
    '../_base_/models/mask_rcnn_aft_conv.py', '../_base_/datasets/camvid_objects.py',
    '../_base_/schedules/det_mini.py', '../_base_/det_runtime.py'
]

# The classes of thin and far things, pedestrians and bicyclists, are a few places of the map each.
metainfo = dict(classes=('car', ), palette=[(64, 0, 128)])

model = dict(
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=96, num_layers=5),
        patch_size=8,
        token_mixer=dict(num_heads=96, kernel_size=7),
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.1)),
    neck=dict(in_channels=96, out_channels=96, in_stride=8, strides=(8, 16, 32), num_outs=4),
    rpn_head=dict(
        in_channels=96,
        feat_channels=96,
        anchor_generator=dict(scales=[3], strides=[8, 16, 32, 64])),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=96, featmap_strides=[8, 16, 32]),
        bbox_head=dict(in_channels=96, fc_out_channels=256, num_classes=1),
        mask_roi_extractor=dict(out_channels=96, featmap_strides=[8, 16, 32]),
        mask_head=dict(
            in_channels=96,
            conv_out_channels=96,
            num_convs=2,
            num_classes=1,
            # mmdet starts the last convolution at a deviation of 1.4 where there is one class.
            predictor_cfg=dict(type='NormedConv2d', tempearture=10))),
    # An eighth of mmdet's proposals and samples: an image has a few objects, and masks cost the most.
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=300, max_per_img=100),
        rcnn=dict(sampler=dict(num=64))))

train_dataloader = dict(batch_size=4, dataset=dict(metainfo=metainfo))
val_dataloader = dict(dataset=dict(metainfo=metainfo))
test_dataloader = dict(dataset=dict(metainfo=metainfo))
train_cfg = dict(max_epochs=48, val_interval=8)
# A heavier head than RetinaNet's, few objects in a batch: at the 1e-3 of the schedule its units die.
optim_wrapper = dict(optimizer=dict(lr=4e-4))
