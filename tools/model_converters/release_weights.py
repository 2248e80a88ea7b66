"""Write the weights of finished runs as release files, with a list of their names and hashes.

    python tools/model_converters/release_weights.py work_dirs/quickstart --out release

Of each work dir the last checkpoint is published as publish_model.py does it, the averaged weights
where EMAHook made them, since these are what was validated. Beside the files lie SHA256SUMS, for
`sha256sum -c`, and weights.json with config, metrics, licence and command of each. With `--address`
the metafiles of configs/ list the files by name and hash, for a release that is about to be
uploaded.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('work_dirs', nargs='+', metavar='WORK_DIR', help='of a finished run')
    parser.add_argument('--out', required=True, type=Path, help='a folder that is new or empty')
    parser.add_argument(
        '--address',
        metavar='hf://ORG/NAME',
        help='where the files will lie, also https://…: list them in the metafiles of configs/',
    )
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

from publish_model import publish, save

from aft_mm.checkpoint import latest_checkpoint, load_from_local
from aft_mm.registry import register_safe_loading
from aft_mm.visualization import read_scalars, validated_metrics, validations

CONFIGS = Path(__file__).parents[2] / 'configs'


def metrics_at(work_dir: str, iteration: int) -> dict[str, float]:
    """What the validation after an iteration of a run gave; nothing if there was none."""
    try:
        log = read_scalars(work_dir)
    except FileNotFoundError:
        return {}
    points = {name: dict(validations(log, name)) for name in validated_metrics(log)}
    return {name: values[iteration] for name, values in points.items() if iteration in values}


def release(work_dir: str, out: Path) -> list[dict]:
    """Publish the last checkpoint of a run; an entry of weights.json per file.

    Raises:
        UserError: there is no checkpoint, or none that is whole.
    """
    path, _ = latest_checkpoint(work_dir)
    if path is None:
        raise UserError(f'{work_dir!r} holds no checkpoint of a run')
    checkpoint = load_from_local(path, map_location='cpu')
    metrics = metrics_at(work_dir, checkpoint['meta']['iter'])
    published = publish(checkpoint, path, 'ema_state_dict' in checkpoint, metrics)
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
    """Write `Weights`, the address of a file, into the entry of a model in the metafile.

    Raises:
        UserError: no metafile has an entry of this name.
    """
    for path in CONFIGS.glob('*/metafile.yml'):
        text = path.read_text(encoding='utf-8')
        if found := re.search(rf'^  - Name: {re.escape(name)}\n(?:    .*\n)+', text, re.M):
            entry = re.sub('^    Weights: .*\n', '', found[0], flags=re.M)
            first, rest = entry.split('\n', 1)
            entry = f'{first}\n    Weights: {address}\n{rest}'
            path.write_text(text.replace(found[0], entry), encoding='utf-8')
            return
    raise UserError(f'no metafile of configs/ has an entry {name!r} for the weights of that run')


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)

    with user_errors(ValueError):
        if args.address and not args.address.startswith(('hf://', 'https://')):
            raise UserError(f'--address must begin with hf:// or https://, got {args.address!r}')
        if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
            raise UserError(f'--out {str(args.out)!r} must be a folder that is new or empty')
        args.out.mkdir(parents=True, exist_ok=True)
        register_safe_loading()
        entries = [entry for work_dir in args.work_dirs for entry in release(work_dir, args.out)]
        (args.out / 'weights.json').write_text(json.dumps(entries, indent=1) + '\n')
        (args.out / 'SHA256SUMS').write_text(
            ''.join(f'{entry["sha256"]}  {entry["file"]}\n' for entry in entries)
        )
        for entry in entries:
            if args.address and entry['file'].endswith('.safetensors'):
                address = f'{args.address.rstrip("/")}/{entry["file"]}#sha256={entry["sha256"]}'
                list_weights(entry['name'], address)
    print(f'{len(entries)} files of {len(args.work_dirs)} runs written to {args.out}')


if __name__ == '__main__':
    main()
