"""The command ``aft_mm plot keys`` as a script."""

from aft_mm.cli.main import script

if __name__ == '__main__':
    script('plot keys')
