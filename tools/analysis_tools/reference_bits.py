"""The command ``aft_mm reference-bits`` as a script."""

from aft_mm.cli.main import script

if __name__ == '__main__':
    script('reference-bits')
