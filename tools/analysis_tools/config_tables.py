"""Update the tables in the READMEs of configs/ from the metafile.yml next to each README.

The metafile has

- Tables: the columns of each NAME, as header and name of the entry;
- Pages: further entries of a NAME, which the pages of docs/tables show or the text states;
- Models (configs) and Others (models of papers only). Each of their Results is a row of its Tables,
  Others first, with its Metrics, the Metadata, and the Metrics of the model's Results with a Log.

A table of a README may be the union of several, `A table 7 + A table 8`; one without columns is a
list of links.

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
# In C, which takes a tenth of the time.
LOADER = getattr(yaml, 'CBaseLoader', yaml.BaseLoader)
REGION = re.compile(r'(<!-- table: (.+?) -->\n)((?:(?!<!--).)*)(<!-- end of table -->)', re.S)


def read_metafile(task: Path) -> dict[str, Any]:
    """Read the metafile of a folder; numbers stay text, so that 2.80 keeps its zero."""
    try:
        text = (task / 'metafile.yml').read_text(encoding='utf-8')
        return {'Tables': {}, 'Pages': {}, 'Others': [], **yaml.load(text, LOADER)}
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


def render(metafile: dict[str, Any], *tables: str) -> str:
    columns = {
        header: name for table in tables for header, name in metafile['Tables'][table].items()
    }
    listed = list(rows(metafile, *tables))
    if not columns:
        return 'Configs: ' + ',\n'.join(first for first, _ in listed) + '\n'
    lines = [['config', *columns], ['---'] * (1 + len(columns))]
    lines += [
        [first, *(cell(entries, name) for name in columns.values())] for first, entries in listed
    ]
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
