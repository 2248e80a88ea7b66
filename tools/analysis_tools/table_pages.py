"""Write docs/tables/: a page per table of the papers, of licences and of speeds.

Sources are the metafiles of configs/, docs/tables/tables.yml, docs/tables/memory.json (bytes saved
for the backward pass, counted by --count) and docs/results/benchmarks/speed.jsonl.

    python tools/analysis_tools/table_pages.py            # part of `make docs`
    python tools/analysis_tools/table_pages.py --count configs/TASK/NAME.py ...
"""

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from config_tables import ROOT, read_metafile, rows

from aft_mm.cli.arguments import tool_parser
from aft_mm.convert import data_licenses
from aft_mm.errors import user_errors

FOLDER = ROOT / 'docs/tables'
MEMORY = FOLDER / 'memory.json'
SPEED = ROOT / 'docs/results/benchmarks/speed.jsonl'
BARS = '▁▂▃▄▅▆▇█'
# Parameters, gradients and two moments, float32.
BYTES_PER_PARAMETER = 16
WIDTH_AND_DEPTH = re.compile(r'-l(\d+)-d(\d+)')
SCHEDULE = re.compile(r'_(\d+)xb(\d+)-(\d+)e')
CONTEXT = re.compile(r'-t(\d+)')
PAPER_RATE = 'Iterations/s (paper)'


def memory_gb(name: str, memory: dict[str, Any], batch: int | None) -> str:
    if name not in memory:
        return '–'
    count = memory[name]
    saved = count['recomputed' if count['with_cp'] else 'saved']
    total = (batch or count['batch']) * saved + BYTES_PER_PARAMETER * count['parameters']
    return f'{total / 1e9:.1f}' + (', recomputed' if count['with_cp'] else '')


def hours(name: str, entries: dict[str, str], facts: dict[str, Any], with_cp: bool) -> str:
    schedule = SCHEDULE.search(name)
    if schedule is None:
        return '–'
    cards, batch, epochs = map(int, schedule.groups())
    if PAPER_RATE in entries:
        samples = facts.get('samples') or facts['bytes'] / int(CONTEXT.search(name)[1])
        iterations = samples * epochs / facts.get('paper_batch', cards * batch)
        return f'{iterations / float(entries[PAPER_RATE]) / 3600:.0f} (paper)'
    weights = int(entries['Parameters'])
    if shape := WIDTH_AND_DEPTH.search(name):
        depth, width = map(int, shape.groups())
        # Projections and MLPs; positions are not multiplied.
        weights = min(12 * depth * width**2, weights)
    tokens = facts.get('bytes') or facts['samples'] * facts['tokens']
    flops = (8 if with_cp else 6) * weights * tokens * epochs
    return f'{flops / (cards * facts["rate"] * 1e12) / 3600:.0f}'


def table(page: dict[str, Any], metafile: dict[str, Any], memory: dict[str, Any]) -> str:
    listed = list(rows(metafile, page['table']))
    shown = metafile['Tables'][page['table']] | metafile['Pages'].get(page['table'], {})
    columns = {
        header: name
        for header, name in shown.items()
        if name.endswith(('(paper)', 'Paper Parameters'))
        and any(name in entries for _, entries in listed)
    }
    counted = ['GB per GPU (count)', *(['hours'] if 'hours' in page else [])]
    lines = [['config', *counted, *(f"paper's {h}" for h in columns)]]
    lines.append(['---'] * len(lines[0]))
    for first, entries in listed:
        link = re.search(r'\]\((.+)\.py\)', first)
        name = link[1] if link else ''  # only a paper has it
        first = first.replace('](', f'](../../configs/{page["task"]}/')
        cells = [first, memory_gb(name, memory, page.get('batch'))]
        if 'hours' in page:
            with_cp = memory.get(name, {}).get('with_cp', False)
            cells.append(hours(name, entries, page['hours'], with_cp))
        lines.append(cells + [entries.get(n, '–') for n in columns.values()])
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def commands(page: dict[str, Any]) -> str:
    cards = page.get('cards', 8)
    train = (
        f'bash tools/dist_train.sh $CONFIG {cards} --work-dir work_dirs/run'
        if cards > 1
        else 'python tools/train.py $CONFIG --work-dir work_dirs/run'
    )
    test = 'python tools/test.py $CONFIG $(cat work_dirs/run/last_checkpoint) --out '
    option = ' \\\n    --cfg-options test_dataloader.dataset.'
    lines = [f'CONFIG=configs/{page["task"]}/{page["config"]}.py', train, f'{test}test.json']
    if page.get('dev'):
        lines.append(f'{test}dev.json{option}split=val')
    if page.get('dev_root'):
        lines.append(f'{test}dev.json{option}data_root=data/wsj/test_dev93')
    if page.get('train'):
        lines.append(f'{test}train.json{option}split=train')
    if page.get('average'):  # the last three checkpoints, which a run keeps
        lines.append(
            'python tools/test.py $CONFIG $(cat work_dirs/run/last_checkpoint) --average 3 \\'
        )
        lines.append('    --out averaged.json')
    if page.get('strided'):
        stride = f'{option}evaluation=strided test_dataloader.dataset.stride=512'
        lines.append(f'{test}strided.json{stride}')
    return '```bash\n' + '\n'.join(lines) + '\n```\n'


def render(page: dict[str, Any], data: dict[str, str], memory: dict[str, Any]) -> str:
    metafile = read_metafile(ROOT / 'configs' / page['task'])
    time = page.get('hours_text') or (
        f'Counted hours are at {page["hours"]["rate"]} TFLOP/s per GPU ({page["hours"]["source"]}).'
    )
    note = wrapped(page.get('memory_text', ''), time)
    readme = f'../../configs/{page["task"]}/README.md#{page["anchor"]}'
    gpus = '8 GPUs' if page.get('cards', 8) == 8 else '1 GPU'
    return f"""# {page['title']}

<!-- Written by tools/analysis_tools/table_pages.py; edit docs/tables/tables.yml instead. -->

The [README]({readme}) explains rows and choices, the [index](index.md) the counts.

## Data

{data[page['data']].strip()}

## Commands

One row of the table, on {gpus}:

{commands(page)}
{wrapped(page['columns'])}

## Memory, hours and the paper's numbers

{table(page, metafile, memory)}
{note}

## Tolerance

{wrapped(page['tolerance'][0].upper() + page['tolerance'][1:])}

## After the first hour

{wrapped(page['hour'])}
"""


def wrapped(*texts: str) -> str:
    words = ' '.join(' '.join(texts).split())
    return '\n'.join(textwrap.wrap(words, 118, break_long_words=False, break_on_hyphens=False))


def index(pages: list[dict[str, Any]]) -> str:
    lines = ''.join(f'- [{page["title"]}]({page["page"]}.md)\n' for page in pages)
    names = '\n'.join(page['page'] for page in pages)
    return f"""# Reproduce a table

<!-- Written by tools/analysis_tools/table_pages.py; edit docs/tables/tables.yml instead. -->

Each table of the papers has a page with data, commands, computed memory and hours, the paper's numbers, and the tolerance
that we suggest. None of these models was trained here. See [get started](../get_started.md) for the installation and
[cluster](../tutorials/cluster.md) for several machines. Set `AFT_MM_DATA` if the data are not in `data/`. Rows of a table
differ only in `CONFIG`.

{lines}
**Memory** is counted in float32 (`aft_mm complexity`): activations saved for the backward pass, weights, gradients
and two moments, without temporary buffers. Rows marked "recomputed" have `with_cp=True`. The
[dry run](../reproduction/index.md#dry-run) compares the count with what a CPU uses.

**Hours** marked "paper" are the paper's iterations at the rate that it prints, without recomputation. Others are counted: 6
FLOP per weight and token, 8 with recomputation, which leaves out the products of attention.

**In the first hour** check that the loss is finite and memory is near the count. Stop and resume once (`--resume`); the
loss must continue.

```{{toctree}}
:hidden:

{names}
```
"""


def speed(lines: list[dict[str, Any]]) -> str:
    last = lines[-1]
    setting = {name: last[name] for name in ('device', 'threads', 'torch')}
    lines = [line for line in lines if setting.items() <= line.items()]
    text = f"""# Speed by commit

CPU time of each op over that of an op of torch (`tools/benchmarks/speed_history.py`), float32, {setting['threads']} thread of
{setting['device']}, torch {setting['torch']}, from {lines[0]['name'][:10]} to {last['name'][:10]}. Lower is faster;
bars are from the smallest (▁) to the largest ratio (█) of a row.

| op | first | last | smallest to largest | by commit |
| --- | --- | --- | --- | --- |
"""
    for name in last['ratios']:
        values = [line['ratios'][name] for line in lines if name in line['ratios']]
        low, high = min(values), max(values)
        steps = [(value - low) / (high - low or 1) for value in values]
        bars = ''.join(BARS[round(step * (len(BARS) - 1))] for step in steps)
        text += (
            f'| {name} | {values[0]:.3g} | {values[-1]:.3g} | {low:.3g} to {high:.3g} | {bars} |\n'
        )
    return text


def licences() -> str:
    return f"""# Licences of the data

*Samples*: whether samples may be published. *Weights*: the licence that `aft_mm publish` writes; without one it requires
`--license`.

{data_licenses.table()}"""


def pages() -> Iterator[tuple[Path, str]]:
    facts = yaml.safe_load((FOLDER / 'tables.yml').read_text(encoding='utf-8'))
    memory = json.loads(MEMORY.read_text(encoding='utf-8')) if MEMORY.exists() else {}
    yield FOLDER / 'index.md', index(facts['pages'])
    for page in facts['pages']:
        yield FOLDER / f'{page["page"]}.md', render(page, facts['data'], memory)
    yield FOLDER / 'licences.md', licences()
    lines = SPEED.read_text(encoding='utf-8').splitlines()
    yield FOLDER / 'speed.md', speed(list(map(json.loads, lines)))


def count(path: Path) -> dict[str, Any]:
    import torch
    from mmengine.registry import MODELS, init_default_scope

    from aft_mm.analysis.model_complexity import Likelihood, saved_memory
    from aft_mm.config.reading import read_config

    config = read_config(str(path))
    init_default_scope(config.get('default_scope', 'mmengine'))
    model, backbone = MODELS.build(config.model), config.model.get('backbone', {})
    parts = [config.model.get(name, {}) for name in ('decoder', 'backbone')]
    with_cp = any(part.get('with_cp', False) for part in parts)
    parameters = sum(x.numel() for x in model.parameters())
    if 'decoder' in config.model:
        memory = Likelihood(model).saved_memory()
    elif backbone:
        size = backbone.img_size
        memory = saved_memory(model, lambda: model(torch.randn(1, 3, size, size)))
    else:
        frames, mask = torch.randn(1, 2400, 40), torch.ones(1, 2400, dtype=torch.bool)
        memory = saved_memory(model, lambda: model.encoder(frames, mask))
    batch = config.train_dataloader.get('batch_size', 1)
    if batch > 1024:  # a batch of tokens
        batch //= 256
    return dict(**memory._asdict(), with_cp=with_cp, parameters=parameters, batch=batch)


def main() -> None:
    parser = tool_parser(__doc__)
    parser.add_argument(
        '--count', nargs='+', type=Path, metavar='CONFIG', help='update memory.json for configs'
    )
    args = parser.parse_args()
    if args.count:
        memory = json.loads(MEMORY.read_text(encoding='utf-8')) if MEMORY.exists() else {}
        memory |= {path.stem: count(path) for path in args.count}
        MEMORY.write_text(
            json.dumps(dict(sorted(memory.items())), indent=1) + '\n', encoding='utf-8'
        )
    for path, text in pages():
        path.write_text(text, encoding='utf-8')


if __name__ == '__main__':
    with user_errors(OSError):
        main()
