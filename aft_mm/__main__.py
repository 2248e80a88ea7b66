"""``python -m aft_mm``: the command ``aft_mm``."""

from .cli.main import main

if __name__ == '__main__':
    main()
