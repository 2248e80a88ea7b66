"""What pyproject.toml cannot say: configs/, tools/ and model-index.yml travel in aft_mm/.mim.

OpenMMLab's packages have theirs there, so that `mim train aft_mm CONFIG` finds them. An editable
installation gets links to those of the checkout.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
CARRIED = ('configs', 'tools', 'model-index.yml')


class BuildWithMim(build_py):
    """Adds what is carried to the build folder; the checkout gets links only."""

    def run(self):
        super().run()
        editable = self.editable_mode
        target = (ROOT if editable else Path(self.build_lib)) / 'aft_mm/.mim'
        if not editable:
            shutil.rmtree(target, ignore_errors=True)  # what an older build has left
        target.mkdir(parents=True, exist_ok=True)
        for name in CARRIED:
            place, source = target / name, ROOT / name
            if editable:
                place.unlink(missing_ok=True)
                place.symlink_to(Path('../..') / name)
            elif source.is_dir():
                shutil.copytree(source, place, ignore=shutil.ignore_patterns('__pycache__'))
            else:
                shutil.copy2(source, place)

    def get_outputs(self, include_bytecode=True):
        added = Path(self.build_lib) / 'aft_mm/.mim'
        return [*super().get_outputs(include_bytecode),
                *(str(path) for path in added.rglob('*') if path.is_file())]


setup(cmdclass=dict(build_py=BuildWithMim))
