"""Print the licences of the data sets of the configs, and of weights trained on them.

docs/data.md has the table that it prints.
"""

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare nothing: the command has no arguments."""
