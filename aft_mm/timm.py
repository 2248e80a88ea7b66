"""Register the image classifiers with timm: ``timm.create_model('aft_conv_tiny', num_classes=10)``.

Another mixer is an argument: ``token_mixer=dict(type='aft_mm.AFTSimple')``.
"""

from typing import Any

from torch import nn

from aft_mm.errors import missing_package
from aft_mm.models import CLASSIFIERS, AFTClassifier

try:
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
except ImportError as error:
    raise missing_package(error, 'aft_mm.timm', 'timm') from None

__all__: list[str] = []


def _default_cfg() -> dict[str, Any]:
    return dict(
        url='',
        num_classes=1000,
        input_size=(3, 224, 224),
        pool_size=None,
        crop_pct=0.9,
        interpolation='bicubic',
        mean=IMAGENET_DEFAULT_MEAN,
        std=IMAGENET_DEFAULT_STD,
        first_conv='backbone.patch_embed.projection',
        classifier='head.fc',
    )


# timm looks for this name.
default_cfgs = generate_default_cfgs({name: _default_cfg() for name in CLASSIFIERS})


def _register(name: str) -> None:
    def create(pretrained: bool = False, **options: Any) -> nn.Module:
        arguments = {**CLASSIFIERS[name], **options}
        features = dict(out_indices=3, feature_cls='getter')
        return build_model_with_cfg(
            AFTClassifier, name, pretrained, feature_cfg=features, **arguments
        )

    create.__name__ = name
    register_model(create)


for _name in CLASSIFIERS:
    _register(_name)
