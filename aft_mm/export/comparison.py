"""Comparison of exported files with their model: outputs, and metrics on test data."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from torch import Tensor

from aft_mm.apis.images import probabilities
from aft_mm.errors import UserError

from .files import FORMATS, GraphFile
from .graphs import Call, Exportable

TOLERANCE = 1e-4
# Root mean square of the change over that of the scores around their mean.
ROUNDED_TOLERANCE = 0.1
EXAMPLES = 300  # for the ranges of int8


def outputs_of(
    exportable: Exportable, files: Sequence[GraphFile]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield cases, with the outputs of the model and of the files.

    Raises:
        UserError: The runtime fails.
    """
    try:
        graphs = zip(exportable.graphs, files, strict=True)
        calls = {graph.name: file.load(graph) for graph, file in graphs}
        yield from exportable.cases(calls)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # runtimes have types of their own
        lines = str(error).strip().splitlines() or [type(error).__name__]
        others = ' or '.join(suffix for suffix in FORMATS if suffix != files[0].suffix)
        raise UserError(
            f'{files[0].runtime} cannot run the graph, try {others}: {lines[0]}'
        ) from error


@torch.no_grad()
def check(exportable: Exportable, files: Sequence[GraphFile]) -> float:
    """Compare files with the model on other inputs and return the largest difference.

    Raises:
        UserError: It exceeds 1e-4 times the largest output, or times 1.
    """
    worst = 0.0
    for name, ours, theirs in outputs_of(exportable, files):
        difference = (ours - theirs).abs().max().item()
        if not difference <= TOLERANCE * max(1.0, ours.abs().max().item()):
            names = ', '.join(repr(str(file.path)) for file in files)
            raise UserError(
                f'the exported graph differs from the model by {difference:.1e} on a random '
                f'{name}, so {names} is removed'
            )
        worst = max(worst, difference)
    return worst


@torch.no_grad()
def check_rounded(exportable: Exportable, files: Sequence[GraphFile], option: str) -> float:
    changes, outputs = [], []
    for _, ours, theirs in outputs_of(exportable, files):
        changes.append((ours - theirs).flatten())
        outputs.append((ours - ours.mean()).flatten())
    change = (torch.cat(changes).square().mean() / torch.cat(outputs).square().mean()).sqrt().item()
    if not change <= ROUNDED_TOLERANCE:
        raise UserError(
            f'--{option} changes the outputs by {change:.1%} of their deviation, more than '
            f'{ROUNDED_TOLERANCE:.0%}, so the file is removed'
        )
    return change


def build_loader(config: Config, split: str) -> Any:
    init_default_scope(config.get('default_scope', 'mmpretrain'))
    return Runner.build_dataloader(config[f'{split}_dataloader'])


@torch.no_grad()
def example_images(config: Config, model: Any) -> list[Tensor]:
    images: list[Tensor] = []
    for batch in build_loader(config, 'train'):
        pixels = model.data_preprocessor(dict(inputs=batch['inputs']), False)['inputs']
        images += pixels.split(1)
        if len(images) >= EXAMPLES:
            break
    return images[:EXAMPLES]


@torch.no_grad()
def compare_metrics(config: Config, loader: Any, model: Any, call: Call, batched: bool) -> str:
    def scores_of_file(images: Tensor) -> Tensor:
        parts = [images] if batched else images.split(1)
        return torch.cat([call({'image': part.contiguous()})[0] for part in parts])

    evaluators = [Evaluator(config.test_evaluator) for _ in range(2)]
    for evaluator in evaluators:
        evaluator.dataset_meta = loader.dataset.metainfo
    for batch in loader:
        data = model.data_preprocessor(batch, False)
        for function, evaluator in zip((model, scores_of_file), evaluators, strict=True):
            scores = probabilities(model, function(data['inputs']))
            for sample, score in zip(data['data_samples'], scores, strict=True):
                sample.set_pred_score(score)
            evaluator.process(data['data_samples'], batch)
    ours, theirs = (evaluator.evaluate(len(loader.dataset)) for evaluator in evaluators)
    # Metrics of each class are lists.
    ours, theirs = (
        {name: ' '.join(f'{x:.2f}' for x in np.ravel(value)) for name, value in metrics.items()}
        for metrics in (ours, theirs)
    )
    metrics = [f'{name} {value} -> {theirs[name]}' for name, value in ours.items()]
    return f'; {len(loader.dataset)} test images: {", ".join(metrics)}'
