import argparse
import importlib.util
import json
import lzma

import numpy as np
from mmengine.registry import DATASETS, init_default_scope
from scipy.special import gammaln

from aft_mm.config.reading import check_data
from aft_mm.datasets.texts import TextFile
from aft_mm.engine import load_run_config
from aft_mm.errors import CONFIG_ERRORS, DATA_ERRORS, UserError, user_errors
from aft_mm.outputs import check_output
from aft_mm.progress import progress


def order_0_bits(values: np.ndarray) -> float:
    share = np.bincount(values, minlength=256) / len(values)
    return float(-(share[share > 0] * np.log2(share[share > 0])).sum())


def ppmd_bits(before: bytes, values: bytes) -> float:
    """Return the bits per byte of `values` after `before`, by PPMd of order 12 with 256 MiB."""
    from pyppmd import Ppmd7Encoder

    def size(text: bytes) -> int:
        encoder = Ppmd7Encoder(12, 2**28)
        return len(encoder.encode(text)) + len(encoder.flush())

    return 8 * (size(before + values) - size(before)) / len(values)


def sorted_points_bits(clouds: np.ndarray) -> float:
    """Return the bits per coordinate of independent points in known order, uint8 clouds [N, P, 3].

    The P points of a cloud have ``P! / Π m!`` orders, where m points share a sort key, so the order
    reduces ``Σ −log₂ p(z) p(y) p(x)`` by ``log₂ (P! / Π m!)``. The key is (z, y, x) if all clouds
    are sorted by it, else z.
    """
    points = clouds.reshape(-1, 3)
    bits = len(points) * sum(order_0_bits(column) for column in points.T)
    whole = clouds.astype(np.int64) @ (2**16, 2**8, 1)
    for keys in whole if (np.diff(whole) >= 0).all() else clouds[..., 0]:
        equal = np.unique(keys, return_counts=True)[1]
        bits -= (gammaln(len(keys) + 1) - gammaln(equal + 1).sum()) / np.log(2)
    return float(bits / points.size)


def run(args: argparse.Namespace) -> None:
    with user_errors(*CONFIG_ERRORS):
        if args.out:
            check_output('--out', args.out, ('.json',))
        cfg = load_run_config(args)
        if 'decoder' not in (cfg.get('model') or {}):
            raise UserError(
                f'{args.config} must be the config of an autoregressive model (one with a decoder)'
            )
        check_data(cfg, 'test')
    with user_errors(*DATA_ERRORS):
        init_default_scope(cfg.default_scope)
        dataset = DATASETS.build(cfg.test_dataloader.dataset)
    parts = []
    with user_errors():
        for index in progress(range(len(dataset)), 'reading'):
            sample = dataset[index]
            # The context was counted with the previous sample.
            parts.append(sample['inputs'][sample['data_samples'].get('num_context', 0) :].flatten())
        values = np.concatenate(parts)
        if values.max() > 255:
            raise UserError(f'the tokens of {args.config} must be bytes, got {values.max()}')
    values = values.astype(np.uint8)
    compressed = lzma.compress(values.tobytes(), preset=9)
    bits = {
        'values': len(values),
        'order 0': order_0_bits(values),
        'xz -9': 8 * len(compressed) / len(values),
    }
    if isinstance(dataset, TextFile) and importlib.util.find_spec('pyppmd'):
        training = DATASETS.build({**cfg.test_dataloader.dataset, 'split': 'train'}).data
        before = np.array(training[: len(training)]).tobytes()
        bits['PPMd after training'] = ppmd_bits(before, values.tobytes())
    if 'point_cloud' in cfg:
        bits['sorted points'] = sorted_points_bits(values.reshape(len(parts), -1, 3))
    numbers = ', '.join(f'{name} {value:.3f}' for name, value in list(bits.items())[1:])
    print(f'\n{bits["values"]} values: {numbers} bits per value')
    if args.out:
        args.out.write_text(json.dumps(bits, indent=2) + '\n')
