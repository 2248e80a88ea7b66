"""The command ``aft_mm train`` as a script."""

from aft_mm.cli.main import script

if __name__ == '__main__':
    script('train')
