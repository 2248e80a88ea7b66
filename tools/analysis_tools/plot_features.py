"""Draw the features of a classifier's test split in the plane by t-SNE (scikit-learn).

The features are what the last linear layer reads. How well classes are apart is a number in the
title: the share of images whose nearest neighbour in feature space is of the same class.

    python tools/analysis_tools/plot_features.py CONFIG CHECKPOINT --num 300 --out features.png
"""

import argparse
from collections.abc import Sequence

from aft_mm.cli.arguments import add_picture_arguments
from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='path of the config of a classifier')
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('--num', type=int, default=300, help='images; %(default)s')
    parser.add_argument('--perplexity', type=float, default=30, help='of t-SNE; %(default)s')
    parser.add_argument('--seed', type=int, default=0, help='of t-SNE')
    add_picture_arguments(parser)
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

import numpy as np
import torch
from sklearn.manifold import TSNE

from aft_mm.apis import build_dataset, class_names, load_network, network_inputs, spread_samples
from aft_mm.checks import check_number
from aft_mm.cli.pictures import check_picture, footer, save
from aft_mm.errors import DATA_ERRORS
from aft_mm.visualization import draw_features

BATCH = 50


def neighbour_share(features: torch.Tensor, labels: np.ndarray) -> float:
    """Share of the features [N, D] whose nearest neighbour has the same label."""
    distance = torch.cdist(features.double(), features.double()).fill_diagonal_(torch.inf)
    return float((labels[distance.argmin(1).numpy()] == labels).mean())


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with user_errors(*DATA_ERRORS):
        check_picture(args)
        check_number('--perplexity', args.perplexity, above=0)
        if args.perplexity >= args.num:
            raise UserError(f'--perplexity must be below --num {args.num}, got {args.perplexity}')
        network = load_network(args.config, args.checkpoint)
        head = getattr(network.model, 'head', None)
        if not hasattr(head, 'pre_logits'):
            raise UserError(f'{args.config} is no classifier of mmpretrain')
        dataset = build_dataset(network.config)
        samples = spread_samples(dataset, args.num)
        labels = np.array([int(sample['data_samples'].gt_label) for sample in samples])
        with torch.no_grad():
            features = torch.cat(
                [
                    head.pre_logits(
                        network.model.extract_feat(
                            network_inputs(network.config, samples[first : first + BATCH])
                        )
                    )
                    for first in range(0, len(samples), BATCH)
                ]
            )
        points = TSNE(perplexity=args.perplexity, random_state=args.seed).fit_transform(
            features.numpy()
        )
        share = neighbour_share(features, labels)
        save(
            draw_features(
                points,
                labels,
                class_names(dataset, max(network.config.model.head.num_classes, 1)),
                f'{len(labels)} images; the nearest neighbour of {100 * share:.1f} % is of their class',
                f'{footer(args.config, args.checkpoint)} · perplexity {args.perplexity:g}',
            ),
            args,
        )
    print(
        f'{len(labels)} images drawn to {args.out}; the nearest neighbour in feature space of '
        f'{100 * share:.1f} % is of their class'
    )


if __name__ == '__main__':
    main()
