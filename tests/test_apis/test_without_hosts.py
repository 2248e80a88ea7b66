"""mmpretrain and mmcv where they are not installed, in a process of its own."""

import subprocess
import sys
from textwrap import dedent

import pytest

pytestmark = pytest.mark.usefixtures('here')
HIDE = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec

def find_others(name, path=None, target=None):
    return None if name.partition('.')[0] in {hidden!r} else find(name, path, target)

PathFinder.find_spec = find_others
"""


def run(code: str, *hidden: str) -> str:
    code = HIDE.format(hidden=hidden) + dedent(code)
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_generator_and_its_pipeline_do_without_them():
    out = run(
        """
        import sys
        import numpy as np
        from aft_mm.apis import get_model, list_models
        from aft_mm.models import generate
        from aft_mm.registry import TRANSFORMS
        model = get_model('aft-local-32-mini_1xb16-2e_mnist', device='cpu')
        tokens = generate(model, length=5, batch_size=2)
        pack = TRANSFORMS.build(dict(type='aft_mm.PackSequence', image_shape=(1, 3, 1)))
        sample = pack(dict(img=np.uint8([[[7], [8], [9]]])))
        print(tuple(tokens.shape), sample['inputs'].tolist(), len(list_models()) > 50)
        assert not {'mmpretrain', 'mmcv'} & set(sys.modules)
        """,
        *('mmpretrain', 'mmcv'),
    )
    assert out == '(2, 5) [7, 8, 9] True\n'


def test_a_classifier_names_mmpretrain_in_one_sentence():
    out = run(
        """
        from aft_mm.apis import ImageClassifier, get_model
        from aft_mm.config.finding import find_config
        from aft_mm.errors import UserError
        for call in (get_model, lambda name: ImageClassifier(find_config(name), None)):
            try:
                call('aft-conv-mini-h96-k7_1xb100-8e_cifar10')
            except UserError as error:
                print(error)
        """,
        'mmpretrain',
    )
    assert out == 2 * "mmpretrain cannot be imported: No module named 'mmpretrain'\n"
