"""Add tools/analysis_tools to the path, since its scripts import each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / 'tools' / 'analysis_tools'))
