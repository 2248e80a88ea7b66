"""Confusion matrix, accuracy per class and the most confident mistakes of a classifier's split.

    python tools/analysis_tools/confusion_matrix.py CONFIG CHECKPOINT --out matrix.png \
        --csv classes.csv --mistakes mistakes.png
"""

import argparse
from collections.abc import Sequence

from aft_mm.cli.arguments import PICTURES, add_picture_arguments, check_output
from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='path of the config of a classifier')
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('--split', choices=('train', 'val', 'test'), default='test')
    parser.add_argument('--batch-size', type=int, default=50)
    parser.add_argument('--csv', help='write images, accuracy and precision per class')
    parser.add_argument('--mistakes', metavar='PNG', help='draw the most confident mistakes')
    parser.add_argument('--num', type=int, default=16, help='how many; %(default)s')
    add_picture_arguments(parser)
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

import numpy as np
import torch
from sklearn.metrics import confusion_matrix

from aft_mm.apis import build_dataset, class_names, load_network, network_inputs, shown_image
from aft_mm.checks import check_int
from aft_mm.cli.pictures import check_picture, footer, save, write_csv
from aft_mm.cli.progress import progress
from aft_mm.errors import DATA_ERRORS
from aft_mm.visualization import draw_confusion, draw_titled_images, most_confident_mistakes


def class_table(counts: np.ndarray, names: Sequence[str]) -> list[dict]:
    """Images, accuracy (recall) and precision per class; empty where there is no image."""
    hits, true, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    return [
        {
            'class': name,
            'images': int(true[i]),
            'accuracy': float(hits[i] / true[i]) if true[i] else '',
            'precision': float(hits[i] / predicted[i]) if predicted[i] else '',
        }
        for i, name in enumerate(names)
    ]


def predict(network, dataset, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [N, K] and labels [N] of a data set."""
    probabilities, labels = [], []
    for first in progress(range(0, len(dataset), batch_size), 'classifying'):
        samples = [dataset[i] for i in range(first, min(first + batch_size, len(dataset)))]
        with torch.no_grad():
            logits = network.model(network_inputs(network.config, samples))
        probabilities.append(logits.double().softmax(1).numpy())
        labels += [int(sample['data_samples'].gt_label) for sample in samples]
    return np.concatenate(probabilities), np.array(labels)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with user_errors(*DATA_ERRORS):
        check_picture(args)
        check_int('--batch-size', args.batch_size, 1)
        check_int('--num', args.num, 1)
        if args.mistakes:
            check_output('--mistakes', args.mistakes, PICTURES)
        network = load_network(args.config, args.checkpoint)
        if network.config is None or not hasattr(network.model, 'head'):
            raise UserError(f'{args.config} is no classifier of mmpretrain')
        dataset = build_dataset(network.config, args.split)
        probabilities, labels = predict(network, dataset, args.batch_size)
        names = class_names(dataset, probabilities.shape[1])
        predicted = probabilities.argmax(1)
        counts = confusion_matrix(labels, predicted, labels=range(len(names)))
        small = footer(args.config, args.checkpoint)
        save(draw_confusion(counts, names, small), args)
        if args.csv:
            write_csv(args.csv, class_table(counts, names))
        wrong = most_confident_mistakes(probabilities, labels, args.num)
        if args.mistakes and len(wrong):
            titles = [
                f'{names[predicted[i]]} {probabilities[i, predicted[i]]:.2f}\n'
                f'is {names[labels[i]]} {probabilities[i, labels[i]]:.2f}'
                for i in wrong
            ]
            images = [shown_image(network.config, dataset[int(i)]) for i in wrong]
            draw_titled_images(
                images,
                titles,
                'The most confident mistakes: prediction, truth, probabilities',
                small,
            ).savefig(args.mistakes, dpi=args.dpi)
    print(
        f'\n{counts.sum()} images, accuracy {100 * counts.trace() / counts.sum():.2f} %, '
        f'drawn to {args.out}'
    )


if __name__ == '__main__':
    main()
