"""Print a config with its inherited entries and with environment variables expanded."""

import argparse
import contextlib
import sys
from collections.abc import Sequence

from aft_mm.cli.arguments import add_config_options
from aft_mm.config.reading import read_config
from aft_mm.errors import user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='path or name of the config')
    add_config_options(parser, 'train_cfg.max_epochs=10')
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)

    # stdout is for the config.
    with user_errors(FileNotFoundError), contextlib.redirect_stdout(sys.stderr):
        config = read_config(args.config, args.cfg_options)
    print(config.pretty_text)


if __name__ == '__main__':
    main()
