"""The command ``aft_mm complexity`` as a script."""

from aft_mm.cli.main import script

if __name__ == '__main__':
    script('complexity')
