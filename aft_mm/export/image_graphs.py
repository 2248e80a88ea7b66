"""Graphs of one input: an image, or the text of a language model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from mmengine.structures import InstanceData
from torch import Tensor, nn
from torch.export import Dim
from torchvision.ops import nms

from aft_mm.errors import UserError
from aft_mm.layers import ConvPatchEmbedding
from aft_mm.layers.mixers.aft_conv import AFTConv
from aft_mm.layers.mixers.aft_full import AFTFull
from aft_mm.layers.mixers.aft_simple import AFTSimple
from aft_mm.layers.mixers.softmax_attention import SoftmaxAttention

from .graphs import Call, Graph

# Other mixers split the tokens into blocks that depend on the grid size.
ANY_SIZE = (AFTConv, AFTFull, AFTSimple, SoftmaxAttention)
#: From images to the outputs of a graph for each.
Run = Callable[[Tensor], Sequence[Sequence[Tensor]]]
# Scores that differ by less may change their order.
SCORE_TOLERANCE = 1e-4


class Wrapper(nn.Module):
    """A model or backbone with a tuple of outputs, `outputs` by name."""

    outputs: Sequence[str] = ('scores',)

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        output = self.model(inputs)
        return (output,) if isinstance(output, Tensor) else tuple(output)

    @staticmethod
    def install(model: Any, run: Run) -> None:
        """Let the graph compute what its model would, up to the post-processing."""
        model.extract_feat = lambda images: torch.cat([scores for (scores,) in run(images)])
        model.head.forward = lambda scores: scores

    @staticmethod
    def match(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(ours, theirs, strict=True)


class Backbone(Wrapper):
    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.outputs = [f'map{index}' for index in model.out_indices]


class Segmentor(Wrapper):
    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        return (
            nn.functional.interpolate(
                self.model(inputs),
                inputs.shape[2:],
                mode='bilinear',
                align_corners=self.model.align_corners,
            ),
        )

    @staticmethod
    def install(model: Any, run: Run) -> None:
        model.encode_decode = lambda images, _: torch.cat([scores for (scores,) in run(images)])


class Detector(Wrapper):
    """The best boxes of a single-stage detector with anchors, after non-maximum suppression.

    They are right for any `score_thr`, since a box suppresses only boxes of lower scores.
    """

    outputs = ('boxes', 'scores', 'labels')

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        settings = model.test_cfg
        if settings.nms.type != 'nms' or not model.bbox_head.use_sigmoid_cls:
            raise UserError(
                'the detector must have sigmoid scores and test_cfg.nms of type nms, got '
                f'{settings.nms.type} and use_sigmoid_cls={model.bbox_head.use_sigmoid_cls}'
            )

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        head, settings = self.model.bbox_head, self.model.test_cfg
        classes, device = head.cls_out_channels, inputs.device
        levels = list(zip(*self.model(inputs), strict=True))
        grids = [logits.shape[2:] for logits, _ in levels]
        best = []
        for (logits, deltas), anchors in zip(
            levels, head.prior_generator.grid_priors(grids, device=device), strict=True
        ):
            scores = logits[0].permute(1, 2, 0).sigmoid().flatten()
            scores, entry = scores.topk(min(settings.nms_pre, len(scores)))
            anchor = entry // classes
            deltas = deltas[0].permute(1, 2, 0).reshape(-1, 4)[anchor]
            best.append((scores, entry % classes, head.bbox_coder.decode(anchors[anchor], deltas)))
        scores, labels, boxes = (torch.cat(parts) for parts in zip(*best, strict=True))
        most = boxes.new_tensor(inputs.shape[:1:-1]).repeat(2)  # W, H, W, H
        boxes = boxes.clamp(min=0).minimum(most)
        # Boxes of other classes are moved apart, as in mmcv.
        moved = boxes + labels[:, None] * (boxes.max() + 1)
        keep = nms(moved, scores, settings.nms.iou_threshold)
        inside = (boxes[:, 2:] - boxes[:, :2] > settings.get('min_bbox_size', -1)).all(1)
        keep = keep[inside[keep]][: settings.max_per_img]
        return boxes[keep], scores[keep], labels[keep]

    @staticmethod
    def install(model: Any, run: Run) -> None:
        def predict(images: Tensor, samples: Sequence[Any], rescale: bool) -> list[InstanceData]:
            results = []
            for sample, (boxes, scores, labels) in zip(samples, run(images), strict=True):
                if rescale:
                    boxes = boxes / boxes.new_tensor(sample.scale_factor).repeat(2)
                found = InstanceData(bboxes=boxes, scores=scores, labels=labels)
                results.append(found[scores > model.test_cfg.score_thr])
            return results

        model.extract_feat = lambda images: images
        model.bbox_head.predict = predict

    @staticmethod
    def match(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of `ours`, each with the nearest of `theirs` of the same class."""
        best = [x[1].amax()[None] if len(x[1]) else x[1].new_zeros(1) for x in (ours, theirs)]
        least = torch.cat([ours[1], theirs[1], *best]).amin()
        sure = ours[1] > least + SCORE_TOLERANCE
        if not sure.any() or not len(theirs[1]):
            yield best[0], best[1]
            return
        rows, others = (
            torch.cat([boxes, scores[:, None], labels[:, None]], 1)
            for boxes, scores, labels in (ours, theirs)
        )
        rows = rows[sure]
        classes = rows.new_tensor([1, 1, 1, 1, 1, 1e4])
        yield rows, others[torch.cdist(rows * classes, others * classes, p=1).argmin(1)]


class TextModel(Wrapper):
    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        return (self.model.head.logits(self.model.decoder(inputs)),)


#: Wrappers of image models by type.
IMAGE_MODELS: Mapping[str, type[Wrapper]] = {
    'ImageClassifier': Wrapper,
    'EncoderDecoder': Segmentor,
    'RetinaNet': Detector,
}


class OneInput:
    """A graph with one input, and other `inputs` on which it is compared with the model."""

    def __init__(
        self,
        wrapper: Wrapper,
        name: str,
        example: Tensor,
        inputs: Sequence[Tensor],
        dynamic: list[dict[int, Any]] | None = None,
    ) -> None:
        self.wrapper, self.name, self.inputs = wrapper, name, inputs
        self.graphs = [Graph('', wrapper, {name: example}, [*wrapper.outputs], dynamic)]

    def cases(self, calls: Mapping[str, Call]) -> Iterator[tuple[str, Tensor, Tensor]]:
        for inputs in self.inputs:
            name = f'input of {" x ".join(map(str, inputs.shape))}'
            outputs = calls['']({self.name: inputs})
            for ours, theirs in self.wrapper.match(self.wrapper(inputs), outputs):
                yield name, ours, theirs


class Text(OneInput):
    """``tokens [1, T] -> scores [1, T, V]``."""

    def __init__(self, model: Any) -> None:
        length = model.decoder.max_length
        example, other = torch.randint(256, (2, 1, length))
        super().__init__(TextModel(model), 'tokens', example, [other])
        self.about = f'tokens [1, {length}] to scores'


class Image(OneInput):
    """``image [B, C, H, W]`` to the outputs of a wrapper.

    Args:
        wrapper: The model, or its backbone.
        backbone: The backbone of the model.
        size: Height and width of the example [px].
        dynamic: Support any B, and any H and W of at least one patch plus one pixel.
    """

    def __init__(self, wrapper: Wrapper, backbone: Any, size: Sequence[int], dynamic: bool) -> None:
        patch, channels = backbone.patch_embed.patch_size, backbone.patch_embed.in_channels
        smallest = patch
        if dynamic:
            check_any_size(backbone)
            # A grid with one row or column has another graph, since torch broadcasts sizes of 1.
            smallest += 1
        high, wide = size
        if min(size) < smallest:
            raise UserError(f'--size must be at least {smallest}, got {high} {wide}')
        shape = (2 if dynamic else 1, channels, high, wide)
        example, *inputs = torch.randn(2, *shape)
        shown: tuple[Any, ...] = shape
        axes = None
        if dynamic:
            shown = 'B', channels, 'H', 'W'
            height, width = (Dim(name, min=smallest) for name in ('height', 'width'))
            axes = [{0: Dim('batch', min=1), 2: height, 3: width}]
            # Other grids, and sizes that are not a multiple of the patch size.
            inputs.append(torch.randn(1, channels, wide + patch, high))
            inputs.append(torch.randn(3, channels, high, wide + patch // 2 + 1))
        super().__init__(wrapper, 'image', example, inputs, axes)
        limit = f', H and W from {smallest}' if dynamic else ''
        self.about = f'image [{", ".join(map(str, shown))}] to {", ".join(wrapper.outputs)}{limit}'


def check_any_size(backbone: Any) -> None:
    for mixer in (layer.token_mixer for layer in backbone.layers):
        if not isinstance(mixer, ANY_SIZE):
            allowed = ', '.join(kind.__name__ for kind in ANY_SIZE)
            kind = type(mixer).__name__
            raise UserError(f'--dynamic needs one of the mixers {allowed}, got {kind}')
    if isinstance(backbone.patch_embed, ConvPatchEmbedding):
        raise UserError('--dynamic needs the patch embedding of conv_stem=False, got True')
