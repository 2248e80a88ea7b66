import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.manifold import TSNE

from aft_mm.errors import DATA_ERRORS, UserError, user_errors
from aft_mm.visualization.figures import new_figure, plain_name

from . import footer
from .networks import (
    batches_of,
    build_dataset,
    check_one_label,
    class_names,
    load_classifier,
    spread_samples,
)

MOST_LEGEND = 20  # names of more classes would overlap
COLOURS = ('#000000', '#e69f00', '#56b4e9', '#009e73', '#cc79a7', '#0072b2', '#d55e00', '#999999')
MARKERS = 'osv^DP*X<'


def draw_features(
    points: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    title: str = 'Features',
    footer: str = '',
) -> Figure:
    if labels.min() < 0 or labels.max() >= len(names):
        raise UserError(
            f'labels must be 0 to {len(names) - 1}, the classes with names, got '
            f'{labels.min()} to {labels.max()}'
        )
    figure = new_figure(7, 4.6, title, footer)
    axis = figure.subplots()
    axis.set_aspect('equal', adjustable='datalim')
    for index, name in enumerate(names):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        style: dict[str, Any] = dict(color=colour, marker=marker, s=14, linewidths=0)
        axis.scatter(*points[labels == index].T, label=plain_name(name), **style)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_xlabel('t-SNE (no unit)', fontsize=7)
    if len(names) <= MOST_LEGEND:
        figure.legend(loc='outside right upper', fontsize=7)
    return figure


BATCH = 50


def neighbour_share(features: torch.Tensor, labels: np.ndarray) -> float:
    distance = torch.cdist(features.double(), features.double()).fill_diagonal_(torch.inf)
    return float((labels[distance.argmin(1).numpy()] == labels).mean())


def run(args: argparse.Namespace) -> None:
    with user_errors(*DATA_ERRORS):
        network = load_classifier(args.network, args.checkpoint)
        check_one_label(network, args.network)
        assert network.config is not None
        head = network.model.head
        dataset = build_dataset(network.config)
        samples = spread_samples(dataset, args.num)
        perplexity = min(30, len(samples) / 3)
        labels = np.array([int(sample['data_samples'].gt_label) for sample in samples])
        with torch.no_grad():
            extract = network.model.extract_feat
            batches = batches_of(network.model, samples, BATCH)
            features = torch.cat([head.pre_logits(extract(batch)) for batch in batches])
        points = TSNE(perplexity=perplexity, random_state=args.seed).fit_transform(features.numpy())
        share = neighbour_share(features, labels)
        names = class_names(dataset, max(network.config.model.head.num_classes, 1), network.model)
        title = f'{len(labels)} images; nearest neighbour of the same class: {100 * share:.1f} %'
        small = f'{footer(args.network, args.checkpoint)} · perplexity {perplexity:g}'
        figure = draw_features(points, labels, names, title, small)
        figure.savefig(args.out, dpi=args.dpi)
    print(
        f'plotted {len(labels)} images to {args.out}; nearest neighbour in feature space of the same '
        f'class: {100 * share:.1f} %'
    )
