from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm.checks import (
    check_choice,
    check_flag,
    check_int,
    check_number,
    check_probability,
    is_int,
    per_dimension,
    refuse,
)
from aft_mm.layers import (
    Block,
    ConvPatchEmbedding,
    GridParameters,
    PatchEmbedding,
    PositionEmbedding,
    QueryPooling,
    Resettable,
)
from aft_mm.layers.block import kinds_of, mixer_of_each
from aft_mm.openmmlab import BaseModule
from aft_mm.registry import MODELS

OUT_TYPES = ('avg_featmap', 'cls_token', 'featmap', 'query_pooling')


@MODELS.register_module()
class AFTViT(Resettable, BaseModule):
    """Vision transformer with any token mixer (arXiv 2105.14103, §5.3).

    Images of any size are padded at the bottom and on the right to a multiple of the patch, and learned
    positions are interpolated.

    Args:
        arch: 'tiny', 'small', 'base' (D = 192, 384, 768, 12 layers), or a dict with embed_dims,
            num_layers and optionally mlp_ratio (default 4).
        img_size: Size (H, W) or int [px], for the learned positions.
        patch_size: Side of a patch [px].
        conv_stem: Embed patches with :class:`ConvPatchEmbedding`.
        token_mixer: Config of the mixer of every block, or a list of one each; None is AFT-full with
            rank 128.
        with_cls_token: Prepend a learned class token, if the mixer accepts one.
        position_embedding: Add a learned vector per token.
        out_indices: Layers whose outputs are returned, negative ones from the end. Only the last
            has the final norm.
        out_type: 'avg_featmap' (mean over the grid), 'query_pooling' (:class:`QueryPooling`) or
            'cls_token' for [B, D], 'featmap' for [B, D, H', W'] with ``H' = ⌈H / patch⌉``.
        drop_rate: Dropout probability after embedding and mixers and in MLPs.
        drop_path_rate: Drop path probability of the last layer; it rises linearly from 0.
        frozen_stages: Freeze the embeddings and the first n layers in evaluation mode, with all
            layers also the norm; below 1 for none.
        with_cp: Gradient checkpointing per block.
        final_norm: LayerNorm after the last layer.
        with_mask_channel: The image has the channel of MaskedDataPreprocessor. Tokens with only
            padding are hidden, 0 in 'featmap' and not counted in the others, so an image has the
            same output in a batch as alone, unless the mixer depends on the grid of the batch.
        bfloat16: Run under bfloat16 autocast and return float32.
        init_cfg: See mmengine's BaseModule; by default the paper's.
    """

    architectures = {
        'tiny': dict(embed_dims=192, num_layers=12),
        'small': dict(embed_dims=384, num_layers=12),
        'base': dict(embed_dims=768, num_layers=12),
    }

    def __init__(
        self,
        arch: str | dict[str, Any] = 'tiny',
        img_size: int | Sequence[int] = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        token_mixer: dict[str, Any] | list[dict[str, Any]] | None = None,
        with_cls_token: bool = False,
        position_embedding: bool = True,
        out_indices: int | Sequence[int] = -1,
        out_type: str = 'avg_featmap',
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        frozen_stages: int = -1,
        with_cp: bool = False,
        final_norm: bool = True,
        with_mask_channel: bool = False,
        bfloat16: bool = False,
        conv_stem: bool = False,
        init_cfg: dict[str, Any] | list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        embed_dims, num_layers, mlp_ratio = self.parse_arch(arch)
        check_int('in_channels', in_channels, 1)
        check_probability('drop_rate', drop_rate)
        check_probability('drop_path_rate', drop_path_rate)
        check_int('frozen_stages', frozen_stages, most=num_layers)
        flags = dict(
            with_cls_token=with_cls_token,
            position_embedding=position_embedding,
            with_cp=with_cp,
            final_norm=final_norm,
            with_mask_channel=with_mask_channel,
            bfloat16=bfloat16,
            conv_stem=conv_stem,
        )
        for name, flag in flags.items():
            check_flag(name, flag)
        _check_out_type(out_type, with_cls_token)
        if token_mixer is None:
            token_mixer = dict(type='aft_mm.AFTFull', rank=128)
        mixers = mixer_of_each(token_mixer, num_layers)
        self.embed_dims = embed_dims
        self.out_type = out_type
        self.out_indices = _absolute('out_indices', out_indices, num_layers)
        self.frozen_stages = frozen_stages
        self.with_cp = with_cp
        self.num_prefix_tokens = int(with_cls_token)
        self.num_extra_tokens = self.num_prefix_tokens  # as mmpretrain's tools call them
        self.in_channels = in_channels
        self.with_mask_channel = with_mask_channel
        self.use_bfloat16 = bfloat16

        embedding = ConvPatchEmbedding if conv_stem else PatchEmbedding
        self.patch_embed = embedding(in_channels, embed_dims, patch_size)
        self.grid = self.patch_embed.grid_of(*per_dimension('img_size', img_size, 2))
        self.cls_token = self.pos_embed = None
        if with_cls_token:
            token = nn.init.trunc_normal_(torch.empty(1, 1, embed_dims), std=0.02)
            self.cls_token = nn.Parameter(token)
        if position_embedding:
            self.pos_embed = PositionEmbedding(self.grid, embed_dims, self.num_prefix_tokens)
        self.drop = nn.Dropout(drop_rate)
        self.layers: Any = nn.ModuleList(
            Block(
                embed_dims,
                mixer,
                grid=self.grid,
                num_prefix_tokens=self.num_prefix_tokens,
                mlp_ratio=mlp_ratio,
                drop_rate=drop_rate,
                drop_path_rate=drop_path_rate * i / max(num_layers - 1, 1),
            )
            for i, mixer in enumerate(mixers)
        )
        self.norm = nn.LayerNorm(embed_dims, eps=1e-6) if final_norm else nn.Identity()
        self.pooling = QueryPooling(embed_dims) if out_type == 'query_pooling' else None
        for module in self._frozen_modules():
            module.requires_grad_(False)
        if self.cls_token is not None and frozen_stages > 0:
            self.cls_token.requires_grad_(False)
        self._built = {*self.state_dict()}

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Return one output per entry of out_indices, in ascending order.

        Args:
            image: [B, C, H, W] with the mask channel.
        """
        with self._autocast(image):
            tokens, grid, key_mask = self._run(image, self.out_indices)
            if len(self.layers) - 1 in self.out_indices:
                tokens[-1] = self.norm(tokens[-1])
            return tuple(self._format(x, grid, key_mask) for x in tokens)

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """Channels, stride [px] and name of each layer, as in timm."""
        stride = self.patch_embed.patch_size
        return [
            dict(num_chs=self.embed_dims, reduction=stride, module=f'layers.{i}')
            for i in range(len(self.layers))
        ]

    def layers_of(self, indices: int | Sequence[int] | None) -> tuple[int, ...]:
        """Return ascending layers; negative ones count from the end, an int n means the last n."""
        depth = len(self.layers)
        if indices is None:
            indices = range(depth)
        elif is_int(indices):
            check_int('indices', indices, 1, depth)
            indices = range(depth - indices, depth)
        return _absolute('indices', indices, depth)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
    ) -> list[Any] | tuple[Tensor, list[Any]]:
        """Return features of layers, like timm.

        Args:
            x: Images [B, C, H, W].
            indices: Layers, or n for the last n; None for all.
            return_prefix_tokens: Return pairs of a feature and the class tokens [B, P, D].
            norm: Apply the final norm to every feature, instead of to none.
            stop_early: Do not run the layers after the last of `indices`.
            output_fmt: 'NCHW' for [B, D, H', W'], 'NLC' for [B, H'·W', D].
            intermediates_only: Return the features only.

        Returns:
            The features; unless `intermediates_only`, the final tokens [B, T, D] and the features.
        """
        check_choice('output_fmt', output_fmt, ('NCHW', 'NLC'))
        wanted = self.layers_of(indices)
        last = wanted[-1] if stop_early or intermediates_only else len(self.layers) - 1
        with self._autocast(x):
            tokens, grid, _ = self._run(x, sorted({*wanted, last}))
            final = self.norm(tokens[-1])
            chosen = [self.norm(t) if norm else t for t in tokens[: len(wanted)]]
        if self.use_bfloat16:
            final, chosen = final.float(), [t.float() for t in chosen]
        features = []
        for t in chosen:
            prefix, feature = t[:, : self.num_prefix_tokens], t[:, self.num_prefix_tokens :]
            if output_fmt == 'NCHW':
                feature = feature.unflatten(1, grid).permute(0, 3, 1, 2).contiguous()
            features.append((feature, prefix) if return_prefix_tokens else feature)
        return features if intermediates_only else (final, features)

    def train(self, mode: bool = True) -> 'AFTViT':
        super().train(mode)
        for module in self._frozen_modules():
            module.eval()
        return self

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Return the depth of a parameter and the number of depths, for layer-wise decay.

        The embeddings have depth 0, layer i has i + 1, the final norm the last one.
        """
        num_depths = len(self.layers) + 2
        name = param_name.removeprefix(prefix)
        stem, _, rest = name.partition('.')
        if not param_name.startswith(prefix):
            return num_depths - 1, num_depths
        if stem in ('patch_embed', 'cls_token', 'pos_embed'):
            return 0, num_depths
        if stem == 'layers':
            return int(rest.partition('.')[0]) + 1, num_depths
        return num_depths - 1, num_depths

    @classmethod
    def parse_arch(cls, arch: str | dict[str, Any]) -> tuple[int, int, float]:
        """Return embed_dims, num_layers and mlp_ratio of an `arch`."""
        if not isinstance(arch, dict):
            check_choice('arch', arch, cls.architectures)
            arch = cls.architectures[arch]
        settings = {'mlp_ratio': 4.0, **arch}
        if settings.keys() != {'embed_dims', 'num_layers', 'mlp_ratio'}:
            refuse('arch', 'a dict of embed_dims, num_layers and mlp_ratio', dict(arch))
        check_int('arch.embed_dims', settings['embed_dims'], 1)
        check_int('arch.num_layers', settings['num_layers'], 1)
        check_number('arch.mlp_ratio', settings['mlp_ratio'], above=0)
        return settings['embed_dims'], settings['num_layers'], settings['mlp_ratio']

    def _frozen_modules(self) -> list[nn.Module]:
        if self.frozen_stages < 1:
            return []
        frozen = [self.patch_embed, self.pos_embed, self.drop, *self.layers[: self.frozen_stages]]
        if self.frozen_stages == len(self.layers):
            frozen.append(self.norm)
        return [module for module in frozen if module is not None]

    def _autocast(self, image: Tensor) -> AbstractContextManager[Any]:
        # A disabled autocast would override the caller's.
        if not self.use_bfloat16 or image.is_meta:
            return nullcontext()
        return torch.autocast(image.device.type, torch.bfloat16)

    def _run(
        self, image: Tensor, indices: Sequence[int]
    ) -> tuple[list[Tensor], tuple[int, int], Tensor | None]:
        """Return tokens [B, T, D] after the layers `indices`, their grid and mask."""
        image, inside, key_mask = self._split_mask(image)
        x, grid = self._embed(image, inside)
        outputs = []
        for i, layer in enumerate(self.layers[: indices[-1] + 1]):
            run = layer.recomputed if self.with_cp and torch.is_grad_enabled() else layer
            x = run(x, grid, key_mask)
            if i in indices:
                outputs.append(x)
        return outputs, grid, key_mask

    def _split_mask(self, image: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the image, 0 in its padding, the mask [B, 1, H, W] of pixels and [B, T] of tokens."""
        channels = self.in_channels + self.with_mask_channel
        floats = isinstance(image, Tensor) and image.is_floating_point() and image.dim() == 4
        if not floats or image.shape[1] != channels or 0 in image.shape[2:]:
            mask = ' and the mask that MaskedDataPreprocessor adds' * self.with_mask_channel
            allowed = f'floats [B, {channels}, H, W] for in_channels={self.in_channels}{mask}'
            refuse('image', allowed, image)
        if not self.with_mask_channel:
            return image, None, None
        image, inside = image.split([self.in_channels, 1], dim=1)
        pooled = F.max_pool2d(inside, self.patch_embed.patch_size, ceil_mode=True)
        key_mask = F.pad(pooled.flatten(1) > 0, (self.num_prefix_tokens, 0), value=True)
        return image.masked_fill(inside <= 0, 0), inside, key_mask

    def _embed(self, image: Tensor, inside: Tensor | None = None) -> tuple[Tensor, tuple[int, int]]:
        masks = [inside] if isinstance(self.patch_embed, ConvPatchEmbedding) else []
        x, grid = self.patch_embed(image, *masks)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        if self.pos_embed is not None:
            x = x + self.pos_embed(grid)
        return self.drop(x), grid

    def _format(self, x: Tensor, grid: tuple[int, int], key_mask: Tensor | None) -> Tensor:
        x = x.float() if self.use_bfloat16 else x
        if self.out_type == 'cls_token':
            return x[:, 0]
        x = x[:, self.num_prefix_tokens :]
        keep = None if key_mask is None else key_mask[:, self.num_prefix_tokens :, None]
        if self.pooling is not None:
            pooled: Tensor = self.pooling(x, None if keep is None else keep.squeeze(-1))
            return pooled.float() if self.use_bfloat16 else pooled
        if keep is not None:
            x = x.masked_fill(~keep, 0)
        if self.out_type == 'avg_featmap':
            return x.mean(dim=1) if keep is None else x.sum(dim=1) / keep.sum(dim=1).clamp_min(1)
        # mmcv's RoIAlign ignores strides.
        maps: Tensor = x.unflatten(1, grid).permute(0, 3, 1, 2)
        return maps.contiguous()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Raise ValueError for other parameters, which mmengine would only log."""
        current = self.state_dict()
        loaded = {
            name.removeprefix(prefix): tensor
            for name, tensor in state_dict.items()
            if name.startswith(prefix)
        }
        on_grid = {
            f'{path}.{name}'
            for path, module in self.named_modules()
            if isinstance(module, GridParameters)
            for name, _ in module.named_parameters()
        }
        fixed = current.keys() & loaded.keys() - on_grid
        # Keys of other modules are left to the loader.
        ours = {name.partition('.')[0] for name in current} | {'cls_token', 'pos_embed', 'norm'}
        # The tensors of adapters, such as LoRA, are saved alone.
        is_adapted = bool(
            loaded.keys() & (current.keys() - getattr(self, '_built', current.keys()))
        )
        complaints = {
            'lacks': [] if is_adapted else [name for name in current if name not in loaded],
            'has another shape of': [
                name
                for name in current
                if name in fixed and loaded[name].shape != current[name].shape
            ],
            'has an unknown': [
                name for name in loaded if name not in current and name.partition('.')[0] in ours
            ],
        }
        for complaint, names in complaints.items():
            if names:
                kinds = kinds_of(layer.token_mixer for layer in self.layers)
                raise ValueError(
                    f'the checkpoint does not fit AFTViT with {len(self.layers)} layers of {kinds} '
                    f'and D={self.embed_dims}: it {complaint} {prefix}{names[0]}'
                    f'{f" and {len(names) - 1} more" if len(names) > 1 else ""}'
                    f'{_hint(names, state_dict, bool(fixed)) if complaint == "lacks" else ""}'
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


def _hint(missing: list[str], loaded: dict[str, Any], has_others: bool) -> str:
    """Return how to load a checkpoint that lacks tensors."""
    ends = (key.removesuffix(missing[0]) for key in loaded if key.endswith(f'.{missing[0]}'))
    prefix = next((end for end in ends if all(end + name in loaded for name in missing)), None)
    if prefix is not None:
        return (
            f', which it has under {prefix!r}: load it with init_cfg=dict(type="Pretrained", '
            f'checkpoint=..., prefix={prefix!r})'
        )
    return '; {**model.state_dict(), **checkpoint} keeps those of the model' * has_others


def _check_out_type(out_type: str, with_cls_token: bool) -> None:
    if out_type not in OUT_TYPES or (out_type == 'cls_token' and not with_cls_token):
        raise ValueError(
            f"out_type must be one of {', '.join(OUT_TYPES)}, 'cls_token' only with a class "
            f'token, got {out_type!r} with with_cls_token={with_cls_token}'
        )


def _absolute(name: str, wanted: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    indices: Any = (wanted,) if is_int(wanted) else wanted
    fits = isinstance(indices, Sequence) and len(indices) > 0
    if not fits or not all(is_int(i) and -num_layers <= i < num_layers for i in indices):
        refuse(name, f'one or more ints, {-num_layers} to {num_layers - 1}', wanted)
    return tuple(sorted({i % num_layers for i in indices}))
