import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from aft_mm.analysis.run_logs import read_scalars, validated_metrics, validations
from aft_mm.analysis.verdicts import mean_interval
from aft_mm.checkpoint import latest_checkpoint, load_from_local
from aft_mm.config.finding import install_root
from aft_mm.convert.data_licenses import setting, training_data
from aft_mm.convert.publish_model import publish, read_metrics, run_name, save
from aft_mm.errors import UserError, user_errors
from aft_mm.registry import register_safe_loading

LISTED = ('license', 'command', 'seed', 'split', 'metrics', 'epoch', 'iter')


def metrics_at(work_dir: str, iteration: int) -> dict[str, float]:
    if not any(Path(work_dir).glob('*/vis_data/scalars.json')):
        return {}
    log = read_scalars(work_dir)
    points = {name: dict(validations(log, name)) for name in validated_metrics(log)}
    return {name: values[iteration] for name, values in points.items() if iteration in values}


def release(work_dir: str, out: Path, license: str | None) -> tuple[list[dict], str]:
    path, _ = latest_checkpoint(work_dir)
    if path is None:
        raise UserError(f'{work_dir!r} has no checkpoint of a run')
    checkpoint = load_from_local(path, map_location='cpu')
    tested = Path(work_dir) / 'metrics.json'
    if tested.exists():
        split, metrics = 'test', read_metrics(str(tested))
    else:
        split, metrics = 'validation', metrics_at(work_dir, checkpoint['meta']['iter'])
    published = publish(checkpoint, path, 'ema_state_dict' in checkpoint, metrics, license)
    meta = published['meta']
    if metrics:
        meta['split'] = split
    name = run_name(meta) or Path(work_dir).name
    known = {key: meta[key] for key in LISTED if key in meta}
    seed = f'_seed{meta["seed"]}' if 'seed' in meta else ''
    entries = [
        dict(name=name, file=file.name, sha256=digest, bytes=file.stat().st_size, **known)
        for file, digest in save(published, out / f'{name}{seed}.pth').items()
    ]
    return entries, meta.get('cfg', '')


def without_seed(command: str) -> str:
    return re.sub(r' randomness\.seed=\d+', '', command).removesuffix(' --cfg-options')


def model_card(name: str, entries: Sequence[Mapping], config: str) -> str:
    runs = [entry for entry in entries if entry['file'].endswith('.safetensors')]
    data = ', '.join(f'{each.name} ({each.terms})' for each in training_data(config))
    facts = {
        'training data': data,
        'licence of the weights': runs[0]['license'],
        'batch per process': setting(config, 'train_dataloader', 'batch_size'),
        'optimizer': setting(config, 'optim_wrapper', 'optimizer'),
    }
    lines = [f'# {name}', '', *(f'- {key}: {value}' for key, value in facts.items() if value), '']
    lines += [
        '| weights | training command | iterations | metrics of | metrics |',
        '| --- ' * 5 + '|',
    ]
    for run in runs:
        metrics = ', '.join(f'{key} {value:.4g}' for key, value in run.get('metrics', {}).items())
        cells = [run['file'], f'`{run.get("command", "")}`', run.get('iter', '')]
        lines.append('| ' + ' | '.join(map(str, [*cells, run.get('split', ''), metrics])) + ' |')
    # Runs with other options than the seed are not averaged.
    recipes = {(without_seed(run.get('command', '')), run.get('split')) for run in runs}
    if len(runs) > 1 and len(recipes) == 1 and 'metrics' in runs[0]:
        lines += ['', f'Mean of {len(runs)} seeds, ± half a 95 % interval:', '']
        for metric in runs[0]['metrics']:
            values = [run['metrics'][metric] for run in runs]
            interval = mean_interval(values)
            low, high = interval or values[:2]
            lines.append(f'- {metric}: {(low + high) / 2:.4g} ± {(high - low) / 2:.2g}')
    lines += ['', 'sha256:', '', *(f'    {entry["sha256"]}  {entry["file"]}' for entry in entries)]
    return '\n'.join([*lines, '', f'Use: `aft_mm test {name} {runs[0]["file"]}`', ''])


def list_weights(name: str, address: str) -> None:
    for path in install_root().glob('configs/*/metafile.yml'):
        text = path.read_text(encoding='utf-8')
        if match := re.search(rf'^  - Name: {re.escape(name)}\n(?:    .*\n)+', text, re.M):
            entry = re.sub('^    Weights: .*\n', '', match[0], flags=re.M)
            first, rest = entry.split('\n', 1)
            entry = f'{first}\n    Weights: {address}\n{rest}'
            path.write_text(text.replace(match[0], entry), encoding='utf-8')
            return
    raise UserError(f'no metafile of configs/ has an entry {name!r} for the weights of its run')


def run(args: argparse.Namespace) -> None:
    with user_errors(ValueError):
        if args.address and not args.address.startswith(('hf://', 'https://')):
            raise UserError(f'--address must begin with hf:// or https://, got {args.address!r}')
        if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
            raise UserError(f'--out must be a new or empty folder, got {str(args.out)!r}')
        args.out.mkdir(parents=True, exist_ok=True)
        register_safe_loading()
        entries: list[dict] = []
        configs: dict[str, str] = {}
        for work_dir in args.work_dirs:
            files, config = release(work_dir, args.out, args.license)
            entries += files
            configs.setdefault(files[0]['name'], config)
        (args.out / 'weights.json').write_text(json.dumps(entries, indent=1) + '\n')
        (args.out / 'SHA256SUMS').write_text(
            ''.join(f'{entry["sha256"]}  {entry["file"]}\n' for entry in entries)
        )
        for name, config in configs.items():
            runs = [entry for entry in entries if entry['name'] == name]
            (args.out / f'{name}.md').write_text(model_card(name, runs, config))
            if args.address:
                first = next(run for run in runs if run['file'].endswith('.safetensors'))
                address = f'{args.address.rstrip("/")}/{first["file"]}#sha256={first["sha256"]}'
                list_weights(name, address)
    print(f'wrote {len(entries)} files of {len(args.work_dirs)} runs to {args.out}')
