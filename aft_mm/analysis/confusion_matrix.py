import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from mmengine.dataset import pseudo_collate
from mmengine.registry import DefaultScope
from sklearn.metrics import confusion_matrix

from aft_mm.checks import check_int
from aft_mm.errors import DATA_ERRORS, UserError, user_errors
from aft_mm.outputs import PICTURES, check_output
from aft_mm.progress import progress
from aft_mm.visualization.figures import new_figure, plain_name

from . import footer, write_csv
from .browse_dataset import draw_titled_images
from .networks import (
    Network,
    build_dataset,
    check_classifier,
    check_one_label,
    class_names,
    load_network,
    network_inputs,
    shown_image,
)

MOST_NAMES = 40  # with more classes, the axes show numbers
MOST_COUNTS = 20


def draw_confusion(
    counts: np.ndarray, names: Sequence[str], footer: str = '', unit: str = 'images'
) -> Figure:
    """Draw counts [K, K] of images or pixels by true class (rows) and predicted class (columns)."""
    share = counts / np.maximum(1, counts.sum(1, keepdims=True))
    edge = min(10.0, max(3.5, 0.42 * len(names)))
    accuracy = counts.trace() / max(1, counts.sum())
    figure = new_figure(
        edge + 2.2, edge + 1.6, f'{counts.sum()} {unit}, accuracy {100 * accuracy:.1f} %', footer
    )
    axis = figure.subplots()
    picture = axis.imshow(share, cmap='cividis', vmin=0, vmax=1, interpolation='nearest')
    if len(names) <= MOST_NAMES:
        names = list(map(plain_name, names))
        axis.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        axis.set_yticks(range(len(names)), names, fontsize=7)
    else:
        axis.tick_params(labelsize=7)
    if len(names) <= MOST_COUNTS:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                style: dict[str, Any] = dict(ha='center', va='center', fontsize=6)
                colour = 'white' if share[row, column] < 0.5 else 'black'
                cell = str(count) if unit == 'images' else f'{100 * share[row, column]:.0f}'
                axis.text(column, row, cell, color=colour, **style)
    axis.set_xlabel('predicted class', fontsize=8)
    axis.set_ylabel('true class', fontsize=8)
    bar = figure.colorbar(picture, ax=axis, fraction=0.04, pad=0.01)
    bar.set_label('share of the true class', fontsize=7)
    bar.ax.tick_params(labelsize=6)
    return figure


def most_confident_mistakes(
    probabilities: np.ndarray, labels: np.ndarray, limit: int
) -> np.ndarray:
    predicted = probabilities.argmax(1)
    (wrong,) = (predicted != labels).nonzero()
    order = np.argsort(-probabilities[wrong, predicted[wrong]], kind='stable')
    return wrong[order][:limit]


def class_table(counts: np.ndarray, names: Sequence[str], unit: str = 'images') -> list[dict]:
    hits, true, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    return [
        {
            'class': name,
            unit: int(true[i]),
            'accuracy': float(hits[i] / true[i]) if true[i] else '',
            'precision': float(hits[i] / predicted[i]) if predicted[i] else '',
        }
        for i, name in enumerate(names)
    ]


def predict(network: Network, dataset: Any, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    probabilities, labels = [], []
    for first in progress(range(0, len(dataset), batch_size), 'classifying'):
        samples = [dataset[i] for i in range(first, min(first + batch_size, len(dataset)))]
        with torch.no_grad():
            logits = network.model(network_inputs(network.model, samples))
        probabilities.append(logits.double().softmax(1).numpy())
        labels += [int(sample['data_samples'].gt_label) for sample in samples]
    return np.concatenate(probabilities), np.array(labels)


def count_pixels(network: Network, dataset: Any) -> np.ndarray:
    size = network.model.num_classes
    ignored = getattr(network.model.decode_head, 'ignore_index', 255)
    counts = np.zeros(size**2, dtype=np.int64)
    with torch.no_grad(), DefaultScope.overwrite_default_scope('mmseg'):
        for index in progress(range(len(dataset)), 'segmenting'):
            (result,) = network.model.test_step(pseudo_collate([dataset[index]]))
            true, predicted = result.gt_sem_seg.data.numpy(), result.pred_sem_seg.data.numpy()
            counted = (true != ignored) & (true < size)
            pairs = true[counted].astype(np.int64) * size + predicted[counted]
            counts += np.bincount(pairs, minlength=size**2)
    return counts.reshape(size, size)


def run(args: argparse.Namespace) -> None:
    with user_errors(*DATA_ERRORS):
        check_int('--batch-size', args.batch_size, 1)
        check_int('--num', args.num, 1)
        if args.mistakes:
            check_output('--mistakes', args.mistakes, PICTURES)
        network = load_network(args.network, args.checkpoint)
        segments = network.config is not None and network.config.default_scope == 'mmseg'
        if not segments:
            check_classifier(network, args.network)
            check_one_label(network, args.network)
        elif args.mistakes:
            raise UserError('--mistakes is for classifiers, got a segmentor')
        dataset = build_dataset(network.config, args.split)
        if segments:
            counts, unit = count_pixels(network, dataset), 'pixels'
        else:
            probabilities, labels = predict(network, dataset, args.batch_size)
            predicted, unit = probabilities.argmax(1), 'images'
            counts = confusion_matrix(labels, predicted, labels=range(probabilities.shape[1]))
        names = class_names(dataset, len(counts))
        small = footer(args.network, args.checkpoint)
        draw_confusion(counts, names, small, unit).savefig(args.out, dpi=args.dpi)
        if args.csv:
            write_csv(args.csv, class_table(counts, names, unit))
        written = [args.out] if args.csv is None else [args.out, args.csv]
        if args.mistakes:
            wrong = most_confident_mistakes(probabilities, labels, args.num)
            if len(wrong):
                titles = [
                    f'predicted {names[predicted[i]]} {probabilities[i, predicted[i]]:.2f}\n'
                    f'true {names[labels[i]]} {probabilities[i, labels[i]]:.2f}'
                    for i in wrong
                ]
                images = [shown_image(network.config, dataset[int(i)]) for i in wrong]
                title = 'Most confident mistakes, with probabilities'
                figure = draw_titled_images(images, titles, title, small)
                figure.savefig(args.mistakes, dpi=args.dpi)
                written.append(args.mistakes)
    print(
        f'\n{counts.sum()} {unit}, accuracy {100 * counts.trace() / counts.sum():.2f} %, '
        f'written to {", ".join(written)}'
    )
