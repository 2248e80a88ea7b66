import shutil

import pytest

from aft_mm.export import operators


@pytest.fixture(scope='session', autouse=True)
def compiled_once(openvino_loops):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            operators,
            'compile_for_openvino',
            lambda library: shutil.copy(openvino_loops(), library),
        )
        yield
