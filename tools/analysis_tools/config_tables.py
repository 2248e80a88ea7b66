"""Update the tables in the READMEs of configs/ from the metafile.yml next to each README.

The metafile has

- Tables: the columns of each NAME, as header and name of the entry;
- Models (configs) and Others (models of papers only). Each of their Results is a row of its Tables,
  Others first. Its entries are its Metrics, the Metadata, and the measured values: the Metrics of
  the model's Results with a Log.

A table of a README may be the union of several, `A table 7 + A table 8`. It leaves out what the
pages of docs/tables show. Of three or more rows it leaves out a column of one value, which the text
states, and moves the common parts of the labels to the header.

    python tools/analysis_tools/config_tables.py [configs/TASK ...]    # after an edit of a metafile
    python tools/analysis_tools/config_tables.py --check               # changes nothing
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from aft_mm.cli.arguments import tool_parser
from aft_mm.errors import UserError, user_errors

ROOT = Path(__file__).parents[2]
# What a paper prints in addition to the result of the test, for docs/tables.
ON_PAGES = re.compile(
    r'Paper |(Train|Parameters per|Iterations|Images|Seconds|Memory|Thousand).*[(]paper[)]'
)
# In C, which takes a tenth of the time.
LOADER = getattr(yaml, 'CBaseLoader', yaml.BaseLoader)
REGION = re.compile(r'(<!-- table: (.+?) -->\n)((?:(?!<!--).)*)(<!-- end of table -->)', re.S)


def read_metafile(task: Path) -> dict[str, Any]:
    """Read the metafile of a folder; numbers stay text, so that 2.80 keeps its zero."""
    try:
        text = (task / 'metafile.yml').read_text(encoding='utf-8')
        return {'Tables': {}, 'Others': [], **yaml.load(text, LOADER)}
    except yaml.YAMLError as error:
        problem = ' '.join(str(error).split())
        raise UserError(f'{task / "metafile.yml"} is not YAML: {problem}') from None


def rows(metafile: dict[str, Any], *tables: str) -> Iterator[tuple[str, dict[str, str]]]:
    for model in metafile['Others'] + metafile['Models']:
        metadata, measured = model.get('Metadata', {}), {}
        for result in model['Results']:
            measured |= result['Metrics'] if 'Log' in result else {}
        for result in model['Results']:
            if {*tables} & {*result.get('Tables', [])}:
                label = result.get('Row') or metadata.get('Label') or model['Name']
                link = f'[{label}]({Path(model["Config"]).name})' if 'Config' in model else ''
                entries = metadata | measured | result.get('Metrics', {})
                yield link or f'{label}, not in this package', entries


def cell(entries: dict[str, str], name: str) -> str:
    text = entries.get(name, '–')
    return f'{int(text) / 1e6:.2f}' if name == 'Parameters' and name in entries else text


def differ(cells: list[str]) -> bool:
    return {*cells} != {'–'} and (len(cells) < 3 or len({*cells}) > 1)


def render(metafile: dict[str, Any], *tables: str) -> str:
    listed = list(rows(metafile, *tables))
    columns = {
        header: name
        for table in tables
        for header, name in metafile['Tables'][table].items()
        if not ON_PAGES.match(name) and differ([cell(entries, name) for _, entries in listed])
    }
    labels = [re.sub(r'\[(.+)\]\(.+\)', r'\1', first).split(', ') for first, _ in listed]
    common = [part for part in labels[0] if all(part in parts for parts in labels[1:])]
    if len(listed) < 3 or any(set(parts) <= set(common) for parts in labels):
        common = []
    title, lines = f' ({", ".join(common)})' if common else '', []
    for (first, entries), parts in zip(listed, labels, strict=True):
        short = ', '.join(part for part in parts if part not in common)
        cells = (cell(entries, name) for name in columns.values())
        lines.append([first.replace(', '.join(parts), short), *cells])
    if not columns:
        return f'Configs{title}: ' + ',\n'.join(line for (line,) in lines) + '\n'
    lines = [[f'config{title}', *columns], ['---'] * (1 + len(columns)), *lines]
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def check_names(task: Path, metafile: dict[str, Any], readme: str) -> None:
    regions = [name for _, names, _, _ in REGION.findall(readme) for name in names.split(' + ')]
    listed = [
        name
        for model in metafile['Others'] + metafile['Models']
        for result in model['Results']
        for name in result.get('Tables', [])
    ]
    for name in sorted({*metafile['Tables'], *listed, *regions}):
        for part, there in [
            ('Tables', name in metafile['Tables']),
            ('a Result', name in listed),
            ('README.md, once', regions.count(name) == 1),
        ]:
            if not there:
                raise UserError(
                    f'table {name!r} of {task} must be in Tables, in a Result and in README.md, '
                    f'but it is not in {part}'
                )


def updated(task: Path) -> str:
    metafile = read_metafile(task)
    readme = (task / 'README.md').read_text(encoding='utf-8')
    check_names(task, metafile, readme)
    return REGION.sub(
        lambda match: match[1] + render(metafile, *match[2].split(' + ')) + match[4], readme
    )


def main() -> None:
    parser = tool_parser(__doc__)
    parser.add_argument(
        'tasks',
        nargs='*',
        type=Path,
        metavar='configs/TASK',
        help='folders with README.md and metafile.yml; default: all whose metafile has Tables',
    )
    parser.add_argument('--check', action='store_true', help='fail if a README is out of date')
    args = parser.parse_args()
    tasks = args.tasks or [
        path.parent
        for path in sorted(ROOT.glob('configs/*/metafile.yml'))
        if read_metafile(path.parent)['Tables']
    ]
    for task in tasks:
        readme, text = task / 'README.md', updated(task)
        if text == readme.read_text(encoding='utf-8'):
            continue
        if args.check:
            raise UserError(
                f'the tables of {readme} differ from its metafile; run '
                'python tools/analysis_tools/config_tables.py'
            )
        readme.write_text(text, encoding='utf-8')
        print(f'updated {readme}')


if __name__ == '__main__':
    with user_errors(OSError):
        main()
