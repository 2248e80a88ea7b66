"""FirstSampleHook, and what bad sequence data gets from tools/train.py."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.dataset import pseudo_collate
from mmengine.registry import MODELS
from torch.utils.data import DataLoader

from aft_mm.datasets import PackSequence, TextFile
from aft_mm.engine import FirstSampleHook
from aft_mm.engine.errors import UserError


@pytest.fixture
def model():
    return MODELS.build(dict(
        type='aft_mm.AutoregressiveModel',
        decoder=dict(
            type='aft_mm.SequenceDecoder', embed_dims=8, num_layers=1, grid=(24, ), drop_rate=0.5,
            embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=200),
            token_mixer=dict(type='aft_mm.AFTSimple')),
        head=dict(type='aft_mm.CategoricalHead', embed_dims=8, num_classes=200)))


class Samples(list):
    """A data set of images, packed when they are asked for."""

    def __init__(self, *shapes, value=199):
        pack = PackSequence(image_shape=(6, 4, 1))
        super().__init__(lambda shape=shape: pack(dict(img=np.full(shape, value, np.uint8)))
                         for shape in shapes)

    def __getitem__(self, index):
        return super().__getitem__(index)()


def check(model, train, val=None):
    loops = [None if dataset is None else SimpleNamespace(
        dataloader=DataLoader(dataset, batch_size=2, collate_fn=pseudo_collate))
             for dataset in (train, val)]
    FirstSampleHook().before_train(
        SimpleNamespace(model=model, train_loop=loops[0], val_loop=loops[1]))


def test_good_data_passes_and_leaves_the_model_as_it_was(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check(model.train(), Samples((6, 4, 1), (5, 4, 1)))
    check(model.train(), Samples((6, 4, 1)), Samples((6, 4)))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(('train', 'val', 'message'), [
    (Samples((5, 4, 1)), None, r'training set .*: image must be uint8 of image_shape \(6, 4, 1\)'),
    (Samples((6, 4, 1)), Samples((6, 4, 3)), r'validation set .*shape \(6, 4, 3\)'),
    (Samples((6, 4, 1), value=200), None, 'training set .*: a token must be .* 200'),
])
def test_a_bad_first_sample_is_named(model, train, val, message):
    with pytest.raises(UserError, match=f'the first sample of the {message}') as error:
        check(model, train, val)
    assert '\n' not in str(error.value)


def test_a_context_beyond_the_position_table_is_named(model, tmp_path):
    (tmp_path / 'text').write_bytes(b'a' * 1000)
    with pytest.raises(UserError, match='training set .* position table of 24 tokens, got 25'):
        check(model, TextFile(str(tmp_path / 'text'), context_length=25))


def only_error(result):
    """The one line that a failed tool adds to the log."""
    assert result.returncode == 1 and 'Traceback' not in result.stderr
    (line, ) = [line for line in result.stderr.splitlines() if line.startswith('Error: ')]
    return line


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'size', 'options', 'message'), [
    ('tiny_text', None, [], "train_dataloader.dataset reads 'text.txt', which does not exist"),
    ('tiny_text', 30, [], "the train split of 'text.txt' has 27 bytes, which is shorter than one "
     'context of 32 bytes'),
    ('tiny_text', 4000, ['model.decoder.grid=(31,)'],
     'the first sample of the training set cannot be used: a sequence must not be longer than'),
    ('tiny_pixels', None, ['train_dataloader.dataset.pipeline.0.image_shape=(8,9,1)'],
     'the first sample of the training set cannot be used: image must be uint8 of image_shape'),
    ('tiny_pixels', None, ['default_hooks.samples.image_shape=(8,9,1)'],
     'image_shape must be (H, W, C) with H·W·C = 64'),
])
def test_training_ends_before_it_begins(run, root, config, tmp_path, name, size, options, message):
    if size is not None:
        (tmp_path / 'text.txt').write_bytes(b'a' * size)
    result = run(root / 'tools/train.py', config(name), '--work-dir', 'here', '--cfg-options',
                 *options, 'randomness.seed=0', cwd=tmp_path)
    assert message in only_error(result)
    assert 'Epoch(train)' not in result.stdout + result.stderr


@pytest.mark.slow
def test_a_run_that_diverges_keeps_its_last_checkpoint(run, root, config, tmp_path):
    (tmp_path / 'text.txt').write_bytes(b'a nice text ' * 400)
    result = run(root / 'tools/train.py', config('tiny_diverging'), '--work-dir', 'here',
                 cwd=tmp_path)
    pattern = (r'the loss of iteration (\d+) is (nan|inf) at a learning rate of 3e\+27; its '
               r'largest gradient is (nan|inf) of \w+\.\S+, .* last checkpoint is .*/epoch_1.pth')
    assert int(re.search(pattern, only_error(result)).group(1)) > 6
    checkpoint = torch.load(tmp_path / 'here/epoch_1.pth', weights_only=True)
    assert all(value.isfinite().all() for value in checkpoint['state_dict'].values())
    assert not list(tmp_path.glob('here/epoch_2.pth'))
