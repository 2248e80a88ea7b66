import argparse
from collections.abc import Sequence

from .dispatch import requested_backends
from .table import print_table


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog='python -m aft_mm.ops', description=print_table.__doc__)
    parser.parse_args(argv)
    try:
        requested_backends()
    except ValueError as error:
        raise SystemExit(f'Error: {error}') from None
    print_table()


if __name__ == '__main__':
    main()
