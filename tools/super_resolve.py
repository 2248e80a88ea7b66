"""The command ``aft_mm super-resolve`` as a script."""

from aft_mm.cli.main import script

if __name__ == '__main__':
    script('super-resolve')
