import os
from pathlib import Path

import pytest


@pytest.fixture
def shared_data():
    """Folder of the data packs: AFT_MM_DATA, or shared/data beside the checkout."""
    return Path(os.environ.get('AFT_MM_DATA') or Path(__file__).parents[3] / 'shared' / 'data')
