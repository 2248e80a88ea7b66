from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aft_mm.checks import check_choice, check_int, check_probability
from aft_mm.layers import Resettable

from .backbones import AFTViT


class AFTClassifier(Resettable):
    """:class:`AFTViT` with a linear classifier, for plain PyTorch and timm.

    Checkpoints of mmpretrain's ImageClassifier with :class:`AFTViT` fit.

    Args:
        arch, token_mixer, patch_size, drop_path_rate: See :class:`AFTViT`.
        class_token: Prepend a learned class token and add learned positions.
        img_size: Size (H, W) or int [px] of learned positions and biases; images may have others.
        num_classes: Number of classes, 0 for none.
        global_pool: 'avg' for the mean of the tokens, 'token' for the class token, '' for none.
        drop_rate: Dropout probability before the classifier.
        proj_drop_rate: Dropout probability after embedding and mixers and in MLPs.
        device, dtype: Of the parameters.
    """

    def __init__(
        self,
        arch: str | dict[str, Any],
        token_mixer: dict[str, Any] | list[dict[str, Any]],
        class_token: bool = False,
        img_size: int | Sequence[int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = 'avg',
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_probability('drop_rate', drop_rate)
        self.backbone = AFTViT(
            arch,
            img_size,
            patch_size,
            in_chans,
            token_mixer,
            with_cls_token=class_token,
            position_embedding=class_token,
            drop_rate=proj_drop_rate,
            drop_path_rate=drop_path_rate,
        )
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = self.embed_dim = self.backbone.embed_dims
        self.num_prefix_tokens = self.backbone.num_prefix_tokens
        self.drop_rate = drop_rate
        self.feature_info = self.backbone.feature_info
        for info in self.feature_info:
            info['module'] = f'backbone.{info["module"]}'
        self.head = nn.ModuleDict()
        self.global_pool = global_pool
        self.to(device=device, dtype=dtype)
        self.reset_classifier(num_classes, global_pool)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, num_classes] of the images [B, C, H, W]."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the normalised tokens [B, T, D], class token first."""
        return self.backbone.forward_intermediates(x, indices=1)[0]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool tokens [B, T, D] to [B, D], and classify them unless `pre_logits`."""
        if self.global_pool == 'avg':
            x = x[:, self.num_prefix_tokens :].mean(1)
        elif self.global_pool == 'token':
            x = x[:, 0]
        if pre_logits:
            return x
        x = nn.functional.dropout(x, self.drop_rate, self.training)
        logits: Tensor = self.head['fc'](x)
        return logits

    def forward_intermediates(
        self, x: Tensor, *args: Any, **kwargs: Any
    ) -> list[Any] | tuple[Tensor, list[Any]]:
        """See :meth:`AFTViT.forward_intermediates`."""
        return self.backbone.forward_intermediates(x, *args, **kwargs)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the layers after those of `indices`, and return these."""
        kept = self.backbone.layers_of(indices)
        self.backbone.layers = self.backbone.layers[: kept[-1] + 1]
        self.backbone.out_indices = (kept[-1],)
        self.feature_info = self.feature_info[: kept[-1] + 1]
        if prune_norm:
            self.backbone.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, '')
        return list(kept)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Make a new classifier; None keeps the pooling."""
        check_int('num_classes', num_classes, 0)
        if global_pool is not None:
            pools = ('', 'avg', 'token') if self.num_prefix_tokens else ('', 'avg')
            check_choice('global_pool', global_pool, pools)
            self.global_pool = global_pool
        self.num_classes = num_classes
        classifier: nn.Module = nn.Identity()
        if num_classes:
            classifier = nn.Linear(self.embed_dim, num_classes)
            nn.init.trunc_normal_(classifier.weight, std=0.02)
            nn.init.zeros_(classifier.bias)
            classifier.to(next(self.parameters()))
        self.head['fc'] = classifier.train(self.training)

    def get_classifier(self) -> nn.Module:
        """Return the linear layer, or an identity without classes."""
        return self.head['fc']

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass, or not."""
        self.backbone.with_cp = enable

    def no_weight_decay(self) -> set[str]:
        """Return the learned positions and position biases."""
        stems = ('cls_token', 'pos_embed', 'pos_bias')
        return {name for name, _ in self.named_parameters() if set(name.split('.')) & set(stems)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of parameter names by depth, for layer-wise decay."""
        return dict(
            stem=r'^backbone\.(?:cls_token|pos_embed|patch_embed)',
            blocks=[(r'^backbone\.layers\.(\d+)', None), (r'^backbone\.norm', (99999,))],
        )


def _arguments(arch: str, mixer: dict[str, Any], class_token: bool) -> dict[str, Any]:
    pool = 'token' if class_token else 'avg'
    return dict(arch=arch, token_mixer=mixer, class_token=class_token, global_pool=pool)


_FULL = dict(type='aft_mm.AFTFull', rank=128)
# As in arXiv 2105.14103, table 7.
CLASSIFIERS = {
    'aft_conv_tiny': _arguments(
        'tiny', dict(type='aft_mm.AFTConv', num_heads=32, kernel_size=11), False
    ),
    'aft_conv_small': _arguments(
        'small', dict(type='aft_mm.AFTConv', num_heads=384, kernel_size=11), False
    ),
    'aft_full_tiny': _arguments('tiny', _FULL, True),
    'aft_full_small': _arguments('small', _FULL, True),
}
