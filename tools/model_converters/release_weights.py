"""Write release files of finished runs, with a list of names and hashes.

    python tools/model_converters/release_weights.py work_dirs/quickstart --out release

The last checkpoint of each work dir is published as by publish_model.py, with the averaged weights
if the run used EMAHook, since those were validated. The output folder also gets SHA256SUMS, for
`sha256sum -c`, and weights.json with config, metrics, licence and command of each file. With
`--address`, addresses and hashes are written to the metafiles of configs/.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from aft_mm.cli.arguments import tool_parser
from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument(
        'work_dirs', nargs='+', metavar='WORK_DIR', help='work dirs of finished runs'
    )
    parser.add_argument('--out', required=True, type=Path, help='a new or empty folder')
    parser.add_argument(
        '--address',
        metavar='hf://ORG/NAME',
        help='future address of the files (or https://...), to add to the metafiles of configs/',
    )
    parser.add_argument(
        '--license', metavar='SPDX', help='licence of all weights; default as for publish_model.py'
    )
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # before the slow imports

sys.path.append(str(Path(__file__).parents[1] / 'analysis_tools'))

from publish_model import publish, save
from run_logs import read_scalars, validated_metrics, validations

from aft_mm.checkpoint import latest_checkpoint, load_from_local
from aft_mm.registry import register_safe_loading

CONFIGS = Path(__file__).parents[2] / 'configs'


def metrics_at(work_dir: str, iteration: int) -> dict[str, float]:
    if not any(Path(work_dir).glob('*/vis_data/scalars.json')):
        return {}
    log = read_scalars(work_dir)
    points = {name: dict(validations(log, name)) for name in validated_metrics(log)}
    return {name: values[iteration] for name, values in points.items() if iteration in values}


def release(work_dir: str, out: Path, license: str | None) -> list[dict]:
    path, _ = latest_checkpoint(work_dir)
    if path is None:
        raise UserError(f'{work_dir!r} has no checkpoint of a run')
    checkpoint = load_from_local(path, map_location='cpu')
    metrics = metrics_at(work_dir, checkpoint['meta']['iter'])
    published = publish(checkpoint, path, 'ema_state_dict' in checkpoint, metrics, license)
    meta = published['meta']
    name = Path(meta.get('command', work_dir).split()[-1]).stem
    known = {
        key: meta[key] for key in ('license', 'command', 'metrics', 'epoch', 'iter') if key in meta
    }
    return [
        dict(name=name, file=file.name, sha256=digest, bytes=file.stat().st_size, **known)
        for file, digest in save(published, out / f'{name}.pth').items()
    ]


def list_weights(name: str, address: str) -> None:
    for path in CONFIGS.glob('*/metafile.yml'):
        text = path.read_text(encoding='utf-8')
        if found := re.search(rf'^  - Name: {re.escape(name)}\n(?:    .*\n)+', text, re.M):
            entry = re.sub('^    Weights: .*\n', '', found[0], flags=re.M)
            first, rest = entry.split('\n', 1)
            entry = f'{first}\n    Weights: {address}\n{rest}'
            path.write_text(text.replace(found[0], entry), encoding='utf-8')
            return
    raise UserError(f'no metafile of configs/ has an entry {name!r} for the weights of its run')


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)

    with user_errors(ValueError):
        if args.address and not args.address.startswith(('hf://', 'https://')):
            raise UserError(f'--address must begin with hf:// or https://, got {args.address!r}')
        if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
            raise UserError(f'--out must be a new or empty folder, got {str(args.out)!r}')
        args.out.mkdir(parents=True, exist_ok=True)
        register_safe_loading()
        entries = [
            entry
            for work_dir in args.work_dirs
            for entry in release(work_dir, args.out, args.license)
        ]
        (args.out / 'weights.json').write_text(json.dumps(entries, indent=1) + '\n')
        (args.out / 'SHA256SUMS').write_text(
            ''.join(f'{entry["sha256"]}  {entry["file"]}\n' for entry in entries)
        )
        for entry in entries:
            if args.address and entry['file'].endswith('.safetensors'):
                address = f'{args.address.rstrip("/")}/{entry["file"]}#sha256={entry["sha256"]}'
                list_weights(entry['name'], address)
    print(f'wrote {len(entries)} files of {len(args.work_dirs)} runs to {args.out}')


if __name__ == '__main__':
    main()
