import shutil

import pytest

from aft_mm.export import operators


@pytest.fixture(scope='session', autouse=True)
def compiled_once(tmp_path_factory):
    """Compile the loops for OpenVINO, which takes ten seconds, once per compiler."""
    compile_loops, folder = operators.compile_for_openvino, tmp_path_factory.mktemp('loops')

    def copy(library):
        compiled = folder / operators.find_compiler().replace('/', '_')
        if not compiled.exists():
            compile_loops(compiled)
        shutil.copy(compiled, library)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, 'compile_for_openvino', copy)
        yield
