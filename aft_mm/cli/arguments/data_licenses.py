"""Print the licences of the data sets of the configs, and of weights trained on them."""

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    pass
