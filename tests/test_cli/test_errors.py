"""Errors with a one-line message, and errors that keep their traceback."""

import re

import numpy as np
import pytest
import torch
from mmengine.dataset import BaseDataset
from mmengine.registry import MODELS, DefaultScope
from torch import nn
from torch.utils.data import DataLoader

from aft_mm import ops
from aft_mm.datasets import PackSequence
from aft_mm.datasets.texts import take_split
from aft_mm.errors import UserError, user_errors
from aft_mm.layers import TokenEmbedding


def sentence(call, *errors):
    with pytest.raises(SystemExit) as end, user_errors(*errors):
        call()
    message = str(end.value)
    assert message.startswith('Error: ') and '\n' not in message
    return message.removeprefix('Error: ')


def embed(value):
    return TokenEmbedding(4, vocab_size=10)(torch.full((1, 3), value))


def test_errors_about_input_have_a_one_line_message():
    assert sentence(lambda: embed(10)) == 'a token must be 0 to 9, got 10'


class Images(BaseDataset):
    """The third image is smaller than the others."""

    def load_data_list(self):
        return [
            dict(img=np.zeros((6, 4 - (i == 2), 1), np.uint8), **self.metainfo) for i in range(4)
        ]


@pytest.mark.parametrize('num_workers', [0, 1])
@pytest.mark.parametrize(
    ('names', 'name'), [({}, 'image 2 must'), (dict(img_path='a/b.png'), "image 'a/b.png' must")]
)
def test_a_bad_image_is_named_also_by_a_worker(num_workers, names, name):
    dataset = Images(metainfo=names, pipeline=[PackSequence((6, 4, 1))])
    loader = DataLoader(
        dataset, batch_size=2, num_workers=num_workers, collate_fn=lambda samples: samples
    )
    message = sentence(lambda: list(loader))
    assert message == (f'{name} be uint8 of image_shape (6, 4, 1), got uint8 of shape (6, 3, 1)')


class Bugs(list):
    def __getitem__(self, index):
        raise ValueError('a bug')


@pytest.mark.parametrize(
    'bug',
    [
        lambda: int('x'),  # not ours
        lambda: next(iter(DataLoader(Bugs([1]), num_workers=1))),
        lambda: take_split(np.zeros(9), 'no split', (1, 0, 0)),  # ours, but not on purpose
        lambda: ops.aft_simple(*[torch.zeros(1, 2, 3)] * 2, torch.zeros(1, 2, 4)),  # not from input
        lambda: {}[0],
    ],
    ids=['int', 'worker', 'accident', 'op', 'key'],
)
def test_a_bug_keeps_its_traceback(bug):
    with pytest.raises((ValueError, KeyError)), user_errors():
        bug()


def test_listed_errors_name_their_place_unless_raised_by_aft_mm():
    def build(**options):
        return lambda: MODELS.build(
            dict(type='aft_mm.AFTConv', embed_dims=8, num_heads=2, grid=(5,), **options)
        )

    assert sentence(build(kernel_size=4), ValueError) == ('kernel_size must be odd, got (4,)')
    assert re.fullmatch(
        r'invalid literal .* \(ValueError at .*test_errors.py:\d+\)',
        sentence(lambda: int('x'), ValueError),
    )
    assert re.fullmatch(
        r'0 \(KeyError at .*test_errors.py:\d+\)', sentence(lambda: {}[0], KeyError)
    )


@pytest.mark.parametrize(
    ('kind', 'name', 'meant'),
    [
        ('AFTViT', 'position_embeding', 'position_embedding'),
        ('AFTViT', 'depth', None),
        ('AFTConv', 'qkv_bais', 'qkv_bias'),
        ('AFTConv', 'depth', None),
        ('TokenEmbedding', 'depth', None),
    ],
)
def test_an_unknown_argument_is_named_with_the_one_meant_or_may_be_inherited(kind, name, meant):
    given = {'type': f'aft_mm.{kind}', name: 3}
    given |= dict(embed_dims=8, num_heads=2, kernel_size=3) if kind == 'AFTConv' else {}
    message = sentence(lambda: MODELS.build(given), TypeError)
    hint = 'one that a base gave goes with _delete_=True in the dict'
    hint = f'did you mean {meant!r}?' if meant else hint
    assert re.fullmatch(f"{kind} has no argument '{name}', only .*, .*; {re.escape(hint)}", message)


@pytest.mark.parametrize(
    ('scope', 'kind', 'meant'),
    [
        ('mmpretrain', 'AFTViT', 'AFTViT'),
        ('mmengine', 'aft_mm.AFTVit', 'AFTViT'),
        ('mmpretrain', 'SimpleFeaturePyramids', 'SimpleFeaturePyramid'),
        ('mmpretrain', 'mmpretrain.NoSuchNet', None),
        ('mmengine', 'aft_mm.CopyTask', None),  # a data set
    ],
)
def test_an_unknown_type_is_named_with_the_one_of_ours_that_is_meant(scope, kind, meant):
    with DefaultScope.overwrite_default_scope(scope):
        message = sentence(lambda: MODELS.build(dict(type=kind)), KeyError)
    hint = 'check its name, or list its module in custom_imports'
    hint = f"did you mean 'aft_mm.{meant}'?" if meant else hint
    assert message == f'type {kind} is not in the {scope}::model registry; {hint}'


def test_an_unknown_argument_of_another_package_may_be_inherited():
    message = sentence(lambda: nn.Linear(2, 3, heads=4), TypeError)
    assert re.search("unexpected keyword argument 'heads'; one that a base gave goes with", message)


def test_a_user_error_is_its_message():
    def fail():
        raise UserError('the data is missing')

    assert sentence(fail) == 'the data is missing'
