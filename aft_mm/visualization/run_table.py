"""Numbers of runs as a table: Markdown, CSV and LaTeX."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence

from .seeds import decimals_of, mean_and_error

#: What a table can be written as, by the ending of its file.
TABLES = ('.md', '.csv', '.tex')
MISSING = '–'
_LATEX = {
    '\\': r'\textbackslash{}',
    '~': r'\textasciitilde{}',
    '^': r'\textasciicircum{}',
    **{character: f'\\{character}' for character in '&%$#_{}'},
}

Runs = Mapping[str, Mapping[str, Sequence[float]]]


def run_table(runs: Runs, kind: str = '.md') -> str:
    """A row per name, a column per number: mean ± standard error of the mean of its values.

    The numbers of a column end where the second digit of its smallest standard error stands, in
    CSV they are whole, with a column of their own for the standard error.

    Args:
        runs: Name of a row to its columns, each the values of the runs behind it, one per seed; a
            column that a row lacks, or has no value of, is a dash there.
        kind: '.md', '.csv' or '.tex' (a ``tabular`` of the package booktabs).

    Raises:
        ValueError: There is no run, or ``kind`` is another.
    """
    if not runs:
        raise ValueError('runs must hold at least one, but it is empty.')
    if kind not in TABLES:
        raise ValueError(f'kind must be one of {", ".join(TABLES)}, got {kind!r}.')
    columns = list(dict.fromkeys(column for values in runs.values() for column in values))
    numbers = {
        name: [
            mean_and_error(values[column]) if values.get(column) else (None, None)
            for column in columns
        ]
        for name, values in runs.items()
    }
    if kind == '.csv':
        return _csv(columns, numbers)
    digits = [
        decimals_of([error for _, error in column], [mean for mean, _ in column if mean])
        for column in zip(*numbers.values(), strict=True)
    ]
    between = ' ± ' if kind == '.md' else r' \pm '
    rows = [
        [
            name,
            *(
                _cell(mean, error, places, between)
                for (mean, error), places in zip(row, digits, strict=True)
            ),
        ]
        for name, row in numbers.items()
    ]
    return (_markdown if kind == '.md' else _latex)(['run', *columns], rows)


def _cell(mean: float | None, error: float | None, places: int, between: str) -> str:
    if mean is None:
        return MISSING
    return f'{mean:.{places}f}' + ('' if error is None else f'{between}{error:.{places}f}')


def _csv(columns: Sequence[str], numbers: Mapping[str, Sequence[tuple]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    # A standard error has a column where there is any.
    known = [any(row[i][1] is not None for row in numbers.values()) for i in range(len(columns))]
    writer.writerow(
        [
            'run',
            *(
                name
                for column, has_error in zip(columns, known, strict=True)
                for name in [column, f'{column} standard error'][: 1 + has_error]
            ),
        ]
    )
    for name, row in numbers.items():
        writer.writerow(
            [
                name,
                *(
                    value
                    for pair, has_error in zip(row, known, strict=True)
                    for value in pair[: 1 + has_error]
                ),
            ]
        )
    return text.getvalue()


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ['---', *['---:'] * (len(header) - 1)], *rows]
    return ''.join(
        f'| {" | ".join(cell.replace("|", chr(92) + "|") for cell in line)} |\n' for line in lines
    )


def _latex(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        rf'\begin{{tabular}}{{l{"r" * (len(header) - 1)}}}',
        r'\toprule',
        _latex_line(map(_escaped, header)),
        r'\midrule',
        *(
            _latex_line(
                [
                    _escaped(name),
                    *(
                        cell.replace(MISSING, '--') if cell == MISSING else f'${cell}$'
                        for cell in cells
                    ),
                ]
            )
            for name, *cells in rows
        ),
        r'\bottomrule',
        r'\end{tabular}',
    ]
    return '\n'.join(lines) + '\n'


def _latex_line(cells: Iterable[str]) -> str:
    return ' & '.join(cells) + r' \\'


def _escaped(text: str) -> str:
    return re.sub('|'.join(map(re.escape, _LATEX)), lambda found: _LATEX[found.group()], text)
