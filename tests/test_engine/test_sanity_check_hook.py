"""SanityCheckHook, and messages of tools/train.py about bad sequence data."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import MODELS
from torch.utils.data import DataLoader

from aft_mm.datasets import PackSequence, TextFile
from aft_mm.engine import SanityCheckHook
from aft_mm.errors import UserError

from ..generation_models import stack
from ..helpers import only_error


@pytest.fixture
def model():
    return MODELS.build(
        dict(
            type='aft_mm.AutoregressiveModel',
            decoder=stack(
                'SequenceDecoder',
                grid=(24,),
                drop_rate=0.5,
                embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=200),
            ),
            head=dict(type='aft_mm.CategoricalHead', embed_dims=8, num_classes=200),
        )
    )


class Samples(list):
    def __init__(self, *shapes, value=199):
        pack = PackSequence(image_shape=(6, 4, 1))
        super().__init__(
            lambda shape=shape: pack(dict(img=np.full(shape, value, np.uint8))) for shape in shapes
        )

    def __getitem__(self, index):
        return super().__getitem__(index)()


def runner(model, train=None, val=None, test=None):
    def loop(dataset):
        if dataset is not None:
            loader = DataLoader(dataset, batch_size=2, collate_fn=pseudo_collate)
            return SimpleNamespace(dataloader=loader)

    return SimpleNamespace(
        model=model, train_loop=loop(train), val_loop=loop(val), test_loop=loop(test)
    )


def check(model, train, val=None):
    SanityCheckHook().before_train(runner(model, train, val))


def test_good_data_passes_and_leaves_the_model_as_it_was(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check(model.train(), Samples((6, 4, 1), (5, 4, 1)))
    check(model.train(), Samples((6, 4, 1)), Samples((6, 4)))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


GOOD = Samples((6, 4, 1))


@pytest.mark.parametrize(
    ('train', 'val', 'message'),
    [
        (Samples((5, 4, 1)), None, r'training set .*: image must be .* image_shape \(6, 4, 1\)'),
        (GOOD, Samples((6, 4, 3)), r'validation set .*shape \(6, 4, 3\)'),
        (Samples((6, 4, 1), value=200), None, 'training set .*: a token must be .* 200'),
    ],
)
def test_a_bad_first_sample_is_named(model, train, val, message):
    with pytest.raises(UserError, match=f'the first sample of the {message}') as error:
        check(model, train, val)
    assert '\n' not in str(error.value)


def test_a_test_and_a_validation_of_their_own_are_checked_too(model):
    bad = Samples((6, 4, 3))
    with pytest.raises(UserError, match='the first sample of the test set cannot be used: image'):
        SanityCheckHook().before_test(runner(model, test=bad))
    with pytest.raises(UserError, match='the first sample of the validation set cannot be used'):
        SanityCheckHook().before_val(runner(model, val=bad))
    SanityCheckHook().before_test(runner(model, test=GOOD))


def test_validation_is_checked_once_in_a_run(model, monkeypatch):
    calls, forward = [], model.forward
    monkeypatch.setattr(
        model, 'forward', lambda mode, **batch: calls.append(mode) or forward(mode=mode, **batch)
    )
    run, hook = runner(model, GOOD, GOOD), SanityCheckHook()
    hook.before_train(run)
    for _ in range(3):
        hook.before_val(run)
    assert calls == ['predict', 'predict']


def test_the_head_is_reached(model, monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError('no such target')

    monkeypatch.setattr(model.head, 'nats', refuse)
    with pytest.raises(UserError, match='training set cannot be used: no such target'):
        check(model, GOOD)


def test_an_empty_set_is_refused(model):
    with pytest.raises(UserError, match='the training set is empty'):
        SanityCheckHook().before_train(runner(model, Samples()))
    with pytest.raises(UserError, match='the test set is empty'):
        SanityCheckHook().before_test(runner(model, test=Samples()))


def test_a_context_beyond_the_position_table_is_named(model, tmp_path):
    (tmp_path / 'text').write_bytes(b'a' * 1000)
    with pytest.raises(UserError, match='training set .* position table of 24 tokens, got 25'):
        check(model, TextFile(str(tmp_path / 'text'), context_length=25))


@pytest.mark.slow
def test_training_is_refused_before_it_starts(run, root, config, tmp_path):
    (tmp_path / 'text.txt').write_bytes(b'a' * 4000)
    words = config('tiny_text'), '--work-dir', 'here', '--cfg-options', 'model.decoder.grid=(31,)'
    result = run(root / 'tools/train.py', *words, cwd=tmp_path)
    message = (
        'the first sample of the training set cannot be used: a sequence must not be longer than'
    )
    assert message in only_error(result)
    assert 'epoch 1, ' not in result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ('tool', 'num_workers', 'image', 'message'),
    [
        ('train', 0, 'np.zeros((8, 7), np.uint8)', '(8, 8, 1), got uint8 of shape (8, 7, 1)'),
        ('test', 1, 'np.zeros((8, 7), np.uint8)', 'image 5 must be uint8 of image_shape (8, 8, 1)'),
        ('train', 1, 'np.full((8, 8), 255, np.uint8)', 'a token must be 0 to 99, got 255'),
    ],
)
def test_a_later_sample_has_a_one_line_message_too(
    run, root, config, tmp_path, tool, num_workers, image, message
):
    (tmp_path / 'own.py').write_text(
        'import numpy as np\nfrom mmengine.dataset import BaseDataset\n'
        'from mmengine.registry import DATASETS\n'
        '@DATASETS.register_module()\nclass Own(BaseDataset):\n'
        '    def load_data_list(self):\n'
        f'        return [dict(img={image} if i == 5 else np.zeros((8, 8), np.uint8))\n'
        '                for i in range(32)]\n'
    )
    loader = (
        f"dict(num_workers={num_workers}, dataset=dict(_delete_=True, type='Own', "
        "pipeline=[dict(type='aft_mm.PackSequence', image_shape=(8, 8, 1))]))"
    )
    (tmp_path / 'config.py').write_text(
        f"_base_ = '{config('tiny_pixels')}'\n"
        "custom_imports = dict(imports=['aft_mm.registry', 'recording_hooks', 'own'])\n"
        f'{tool}_dataloader = {loader}\n'
        'model = dict(decoder=dict(embedding=dict(vocab_size=100)), head=dict(num_classes=100))\n'
        'default_hooks = dict(checkpoint=dict(save_best=None))\n'
    )
    words = ['--no-validate']
    if tool == 'test':
        built = Config.fromfile(tmp_path / 'config.py', import_custom_modules=False).model
        model = MODELS.build(dict(built, type='aft_mm.AutoregressiveModel'))
        torch.save(dict(state_dict=model.state_dict()), tmp_path / 'a.pth')
        words = ['a.pth']
    result = run(
        root / f'tools/{tool}.py',
        'config.py',
        *words,
        cwd=tmp_path,
        env={'PYTHONPATH': f'{tmp_path}:{root}/tests/configs'},
    )
    assert message in only_error(result)


@pytest.mark.slow
def test_a_run_that_diverges_keeps_its_last_checkpoint(run, root, config, tmp_path):
    (tmp_path / 'text.txt').write_bytes(b'a nice text ' * 400)
    result = run(
        root / 'tools/train.py', config('tiny_diverging'), '--work-dir', 'here', cwd=tmp_path
    )
    pattern = (
        r'the loss of iteration (\d+) is (nan|inf) at a learning rate of 3e\+27; its '
        r'largest gradient is (nan|inf) of \w+\.\S+, .* last checkpoint is .*/epoch_1.pth'
    )
    assert int(re.search(pattern, only_error(result)).group(1)) > 6
    checkpoint = torch.load(tmp_path / 'here/epoch_1.pth', weights_only=True)
    assert all(value.isfinite().all() for value in checkpoint['state_dict'].values())
    assert not list(tmp_path.glob('here/epoch_2.pth'))
