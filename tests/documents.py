"""Commands and code blocks of the documentation."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import table_pages

ROOT = Path(__file__).parents[1]
PATTERNS = (
    '*',
    'docs/*',
    'docs/benchmarks/*',
    'docs/reproduction/*',
    'docs/tasks/*',
    'docs/tutorials/*',
    'configs/*/README',
    'examples/*/README',
)
# Pages that `make docs` writes.
WRITTEN = {path.relative_to(ROOT).as_posix(): text for path, text in table_pages.pages()}
PAGES = sorted(
    [
        *(
            path.relative_to(ROOT).as_posix()
            for pattern in PATTERNS
            for path in ROOT.glob(f'{pattern}.md')
        ),
        *WRITTEN,
    ]
)
# First words of commands in indented blocks; other blocks are formulas and folders.
COMMANDS = (
    'aft_mm ',
    'python',
    'bash',
    'make',
    'pip',
    'source',
    'export',
    'pytest',
    'compute-sanitizer',
    'cp',
    'git',
    'CONFIG=',
    'OMP_NUM_THREADS=',
    'AFT_MM_',
)


class Command(NamedTuple):
    page: str
    text: str
    words: list[str]


def text_of(page: str) -> str:
    """Return the text of a page, or of all pages of a folder."""
    if (ROOT / page).is_dir():
        return '\n'.join(path.read_text() for path in sorted((ROOT / page).glob('*.md')))
    return WRITTEN.get(page) or (ROOT / page).read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf'^```{language}\n(.*?)^```', text_of(page), re.M | re.S)


def shell(page: str) -> list[str]:
    text = re.sub(r'^```\w*\n.*?^```', '', text_of(page), flags=re.M | re.S)
    indented = [
        re.sub('^    ', '', block, flags=re.M)
        for block in re.findall(r'(?:^    .*\n)+', text, re.M)
    ]
    return blocks(page, 'bash') + [block for block in indented if block.startswith(COMMANDS)]


def commands(page: str) -> list[Command]:
    """Return every command of a page, with variables replaced by their values."""
    found, values = [], {}
    for block in shell(page):
        quoted = re.sub('"[^"]*"', lambda found: found[0].replace('\n', ' '), block)
        for line in quoted.replace('\\\n', ' ').splitlines():
            line = _without_substitutions(line)
            for name, value in values.items():
                line = re.sub(rf'[$]({name}\b|{{{name}}})', value, line)
            lexer = shlex.shlex(line, posix=True, punctuation_chars='|<>;&')
            lexer.whitespace_split, lexer.commenters = True, '#'
            words: list[str] = []
            for word in [*lexer, ';']:
                if set(word) <= set('|;&'):
                    words = _without_variables(words, values)
                    if words:
                        found.append(Command(page, line.strip(), words))
                    words = []
                else:
                    words.append(word)
    return found


def _without_substitutions(line: str) -> str:
    while '$(' in line:
        start = line.index('$(')
        end, depth = start + 2, 1
        while depth:
            depth += {'(': 1, ')': -1}.get(line[end], 0)
            end += 1
        line = f'{line[:start]}VALUE{line[end:]}'
    return line


def _without_variables(words: list[str], values: dict[str, str]) -> list[str]:
    """Remove redirections and variable assignments, and store their values."""
    while any(word in ('<', '>') for word in words):
        at = next(i for i, word in enumerate(words) if word in ('<', '>'))
        del words[at : at + 2]
    if words[:1] == ['do']:
        del words[0]
    if words[:1] in (['for'], ['done']):
        return []
    while words and re.match(r'[A-Za-z_]+=', words[0]):
        name, _, value = words.pop(0).partition('=')
        values[name] = value
    return words
