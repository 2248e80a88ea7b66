"""Print a config with everything it inherits and the variables of the environment filled in."""

import argparse

from mmengine.config import DictAction

from aft_mm.cli.command_line import read_config
from aft_mm.cli.errors import one_sentence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='path of the config')
    parser.add_argument(
        '--cfg-options', nargs='+', action=DictAction, help='override, key.sub=value ...')
    args = parser.parse_args()

    config = read_config(args.config)
    if args.cfg_options:
        config.merge_from_dict(args.cfg_options)
    print(config.pretty_text)


if __name__ == '__main__':
    with one_sentence(FileNotFoundError):
        main()
