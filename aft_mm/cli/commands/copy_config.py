import argparse
import ast
import os
import shlex
from pathlib import Path

from mmengine.config import Config

from aft_mm.config.finding import find_config, install_root
from aft_mm.config.reading import READ, read_config
from aft_mm.config.texts import assigned, literal
from aft_mm.errors import UserError, user_errors
from aft_mm.outputs import check_suffix


def with_portable_bases(path: Path) -> str:
    """Return the text of a config with bases of aft_mm as ``aft_mm::``, others as absolute paths."""
    text = path.read_text(encoding='utf-8')
    bases = assigned(text, '_base_')
    if bases is None:
        return text
    written = ast.literal_eval(bases)
    ours = (install_root() / 'configs').resolve()
    names = []
    for name in [written] if isinstance(written, str) else written:
        if '::' not in name and '://' not in name:
            base = (path.parent / name).resolve()
            inside = ours in base.parents
            name = f'aft_mm::{base.relative_to(ours)}' if inside else str(base)
        names.append(name)
    assert bases.end_lineno is not None and bases.end_col_offset is not None  # of ast.parse
    lines = text.encode().splitlines(keepends=True)  # ast counts bytes
    before = b''.join(lines[: bases.lineno - 1]) + lines[bases.lineno - 1][: bases.col_offset]
    after = b''.join(lines[bases.end_lineno - 1 :])[bases.end_col_offset :]
    listed = ''.join(f'    {literal(name)},\n' for name in names)
    return f'{before.decode()}[\n{listed}]{after.decode()}'


def run(args: argparse.Namespace) -> None:
    with user_errors():
        path = Path(find_config(args.config))
        out = Path(args.out or path.name)
        check_suffix('--out', out, ('.py',))
        if out.exists():
            raise UserError(f'{str(out)!r} exists already; name another file with --out')
        if args.keep_bases and args.cfg_options:
            raise UserError(
                '--keep-bases and --cfg-options cannot be combined: with its bases the '
                'file is copied unchanged'
            )
        if args.keep_bases:
            text = with_portable_bases(path)
        else:
            config = read_config(args.config, args.cfg_options)
            # Variables that the config has used already would change nothing.
            text = Config({key: config[key] for key in config if key in READ}).pretty_text
    with user_errors(OSError):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding='utf-8')
    print(f'written to {out}; train it with `aft_mm train {shlex.quote(os.fspath(out))}`')
