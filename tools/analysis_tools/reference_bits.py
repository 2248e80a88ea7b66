"""What a trained model has to beat on the test split of a config, in bits per predicted dimension.

- order 0: the entropy of the split's own histogram, the least that any model without context needs;
- xz -9: a general compressor on the same bytes in the same order.

    python tools/analysis_tools/reference_bits.py CONFIG --out references.json
"""

import argparse
import json
import lzma
from pathlib import Path

import numpy as np
from mmengine.config import DictAction
from mmengine.registry import DATASETS, init_default_scope
from mmengine.utils import track_iter_progress

from aft_mm.engine.command_line import CONFIG_ERRORS, DATA_ERRORS, check_data, load_config
from aft_mm.engine.errors import one_sentence


def order_0_bits(values: np.ndarray) -> float:
    """Entropy of the histogram of uint8 values, bits per value."""
    share = np.bincount(values, minlength=256) / len(values)
    return float(-(share[share > 0] * np.log2(share[share > 0])).sum())


def xz_bits(values: np.ndarray) -> float:
    """Size of ``xz -9`` over the number of uint8 values, bits per value."""
    return len(lzma.compress(values.tobytes(), preset=9)) * 8 / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('config', help='path of the config of an autoregressive model')
    parser.add_argument('--out', type=Path, metavar='JSON', help='write the numbers to this file')
    parser.add_argument(
        '--cfg-options', nargs='+', action=DictAction, default={}, metavar='KEY=VALUE',
        help='override entries of the config')
    parser.set_defaults(work_dir=None, launcher='none', local_rank=0)
    args = parser.parse_args()
    with one_sentence(*CONFIG_ERRORS):
        cfg = load_config(args)
        check_data(cfg, 'test')
    with one_sentence(*DATA_ERRORS):
        init_default_scope(cfg.default_scope)
        dataset = DATASETS.build(cfg.test_dataloader.dataset)
    parts = []
    with one_sentence():
        for index in track_iter_progress(range(len(dataset))):
            sample = dataset[index]
            # Context that is only given, not predicted, was counted in the sample before.
            parts.append(sample['inputs'][sample['data_samples'].get('num_context', 0):].flatten())
    values = np.concatenate(parts).astype(np.uint8)
    bits = {'values': len(values), 'order 0': order_0_bits(values), 'xz -9': xz_bits(values)}
    print(f'\n{bits["values"]} values: order 0 {bits["order 0"]:.3f}, xz -9 {bits["xz -9"]:.3f} '
          'bits per value')
    if args.out:
        args.out.write_text(json.dumps(bits, indent=2) + '\n')


if __name__ == '__main__':
    main()
