"""The tables in the READMEs of configs/, made of the numbers that the metafiles beside them hold.

A table stands in README.md between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. Of the
metafile.yml beside it are read

- Tables: the columns of each NAME, a header and the entry of a row that stands below it;
- Models, the configs, and Others, which only papers have. Each of their Results is a row of the
  tables that it lists in Tables, Others first. Its entries are its Metrics, the Metadata, and what
  was measured here: the Metrics of those Results of the model that name a Log.

Numbers are written as in the metafile, but for Parameters, which are in millions. A missing entry
is a dash, and a column of dashes is left out: one for what was measured here may wait for it.

    python tools/analysis_tools/config_tables.py [configs/TASK ...]    # after an edit of a metafile
    python tools/analysis_tools/config_tables.py --check               # changes nothing
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from aft_mm.errors import UserError, user_errors

ROOT = Path(__file__).parents[2]
REGION = re.compile(r'(<!-- table: (.+?) -->\n)((?:(?!<!--).)*)(<!-- end of table -->)', re.S)


def read_metafile(task: Path) -> dict[str, Any]:
    """The metafile of a folder; numbers stay the text that they are, 2.80 for instance."""
    try:
        text = (task / 'metafile.yml').read_text(encoding='utf-8')
        return {'Tables': {}, 'Others': [], **yaml.load(text, yaml.BaseLoader)}
    except yaml.YAMLError as error:
        problem = ' '.join(str(error).split())
        raise UserError(f'{task / "metafile.yml"} is not YAML: {problem}') from None


def rows(metafile: dict[str, Any], table: str) -> Iterator[tuple[str, dict[str, str]]]:
    """First cell and entries of each row of a table."""
    for model in metafile['Others'] + metafile['Models']:
        metadata, measured = model.get('Metadata', {}), {}
        for result in model['Results']:
            measured |= result['Metrics'] if 'Log' in result else {}
        for result in model['Results']:
            if table in result.get('Tables', []):
                label = result.get('Row') or metadata.get('Label') or model['Name']
                link = f'[{label}]({Path(model["Config"]).name})' if 'Config' in model else ''
                entries = metadata | measured | result.get('Metrics', {})
                yield link or f'{label}, not in this package', entries


def cell(entries: dict[str, str], name: str) -> str:
    text = entries.get(name, '–')
    return f'{int(text) / 1e6:.2f}' if name == 'Parameters' and name in entries else text


def render(metafile: dict[str, Any], table: str) -> str:
    """A table in Markdown, with a newline at its end."""
    found = list(rows(metafile, table))
    columns = {
        header: name
        for header, name in metafile['Tables'][table].items()
        if any(name in entries for _, entries in found)
    }
    lines = [['config', *columns], ['---'] * (1 + len(columns))]
    lines += [
        [first, *(cell(entries, name) for name in columns.values())] for first, entries in found
    ]
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def check_names(task: Path, metafile: dict[str, Any], readme: str) -> None:
    """Raise a UserError unless README, Tables and Results name the same tables, each once."""
    regions = [name for _, name, _, _ in REGION.findall(readme)]
    listed = [
        name
        for model in metafile['Others'] + metafile['Models']
        for result in model['Results']
        for name in result.get('Tables', [])
    ]
    for name in sorted({*metafile['Tables'], *listed, *regions}):
        for place, there in [
            ('Tables', name in metafile['Tables']),
            ('a Result', name in listed),
            ('README.md, once', regions.count(name) == 1),
        ]:
            if not there:
                raise UserError(
                    f"the table '{name}' of {task} must stand in Tables, in a Result "
                    f'and in README.md, but it is not in {place}'
                )


def updated(task: Path) -> str:
    """README.md of a folder with its tables made anew."""
    metafile = read_metafile(task)
    readme = (task / 'README.md').read_text(encoding='utf-8')
    check_names(task, metafile, readme)
    return REGION.sub(lambda found: found[1] + render(metafile, found[2]) + found[4], readme)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        'tasks',
        nargs='*',
        type=Path,
        metavar='configs/TASK',
        help='folders with README.md and metafile.yml, by default all whose metafile has Tables',
    )
    parser.add_argument('--check', action='store_true', help='end with 1 where a README is stale')
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
                f'the tables of {readme} are not those of its metafile; run '
                'python tools/analysis_tools/config_tables.py'
            )
        readme.write_text(text, encoding='utf-8')
        print(f'{readme} has new tables')


if __name__ == '__main__':
    with user_errors(OSError):
        main()
