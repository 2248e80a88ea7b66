"""Pairs of sentences as subwords: pairs that are read, left out or refused, and messages."""

import gzip
import logging
import re
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import DATASETS

from aft_mm.datasets import ParallelText
from aft_mm.datasets.texts import encode_cached
from aft_mm.engine.preflight import check_overlap
from aft_mm.tokenizers import Subwords, split_lines

from ..errors import refuses, stops
from ..helpers import command
from ..parallel_data import MISSING, REASON, VOCAB_SIZE, sentences, write_subwords

pytestmark = pytest.mark.skipif(bool(MISSING), reason=REASON)


@pytest.fixture
def build(pairs, tmp_path):
    def call(source: bytes, target: bytes, **options):
        (tmp_path / 'a').write_bytes(source)
        (tmp_path / 'b').write_bytes(target)
        files = dict(source_file=str(tmp_path / 'a'), target_file=str(tmp_path / 'b'))
        files |= dict(subwords=str(pairs / 'subwords.model'))
        return DATASETS.build(dict(type='aft_mm.ParallelText', **files, **options))

    return call


@pytest.fixture
def warnings(monkeypatch):
    logger = MMLogger.get_instance(f'parallel {id(monkeypatch)}')
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


@pytest.mark.parametrize('test_mode', [False, True])
def test_samples_are_the_subwords_of_the_pairs(pairs, test_mode):
    source, target = sentences(120)
    data = ParallelText(
        str(pairs / 'train.de'),
        str(pairs / 'train.en'),
        str(pairs / 'subwords.model'),
        test_mode=test_mode,
    )
    assert len(data) == 120 and data.metainfo['vocab_size'] == VOCAB_SIZE
    for index in (0, 7, 119):
        sample = data[index]
        tokens = sample['data_samples'].source, sample['inputs']
        assert [len(one) for one in tokens] == data.lengths[index].tolist()
        for one, text in zip(tokens, (source[index], target[index]), strict=True):
            assert one.dtype == torch.int32 and one[-1] == data.subwords.end
            assert data.subwords.decode(one) == text
            assert (one[:-1] != data.subwords.end).all()
        assert sample['data_samples'].get('reference') == (target[index] if test_mode else None)
    with pytest.raises(IndexError):
        data[120]


def test_gzip_files_are_the_same_data(pairs, tmp_path):
    for language in ('de', 'en'):
        content = (pairs / f'train.{language}').read_bytes()
        (tmp_path / f'train.{language}.gz').write_bytes(gzip.compress(content))
    plain, packed = (
        ParallelText(f'{where}/train.de', f'{where}/train.en', str(pairs / 'subwords.model'))
        for where in (pairs, tmp_path)
    )
    for one, other in zip(plain, packed, strict=True):
        assert torch.equal(one['inputs'], other['inputs'])
        assert torch.equal(one['data_samples'].source, other['data_samples'].source)


def test_pairs_that_cannot_be_used_are_left_out_counted_and_named(build, warnings):
    long = b'Hund ' * 9
    data = build(
        b'ein\n\nzwei\n \nrot\n' + long + b'\nMann', b'one\no\n\nn\nred\ndogs\nman\n', max_length=8
    )
    assert [data.subwords.decode(one['inputs']) for one in data] == ['one', 'red', 'man']
    assert len(data) == len(data.lengths) == 3
    (sentence,) = warnings
    assert 'of the 7 pairs' in sentence and '3 with an empty side (lines 2, 3, 4)' in sentence
    assert '1 longer than 8 subwords (line 6) are left out' in sentence


def test_two_sides_with_the_same_text_are_said(build, warnings):
    build(b'ein\nzwei\n', b'ein\r\nzwei')
    (line,) = warnings
    assert line.startswith('source_file ') and line.endswith("/b' have the same text")


def test_validation_pairs_that_are_trained_on_are_announced(build):
    lines = [text.encode() for text in sentences(40)[0]]
    trained = build(b'\n'.join(lines), b'\n'.join(lines[::-1]))
    for number, share in ((1, 0), (10, 10)):  # a sentence may come again
        pairs = list(zip(lines, lines[::-1], strict=True))[:number] + [
            (f'{text} rot'.encode(), b'red') for text in sentences(39, 1)[0]
        ]
        tested = build(*(b'\n'.join(side) for side in zip(*pairs, strict=True)), test_mode=True)
        runner = MagicMock()
        runner.train_loop.dataloader.dataset = trained
        runner.val_loop.dataloader.dataset = tested
        check_overlap(Config(), runner)
        said = [call.args[0] for call in runner.logger.warning.call_args_list]
        assert len(said) == bool(share)
        assert not said or re.match(
            '[0-9]+ of the 4[0-9] pairs of the validation set are also', said[0]
        )


def test_a_byte_that_ends_a_line_is_a_space(tmp_path):
    path, out = tmp_path / 'text', tmp_path / 'bytes.model'
    path.write_text('ein Hund schläft\n' * 40, encoding='utf-8')
    command('convert subwords')([str(path), '--vocab-size', '283', '--out', str(out)])
    subwords = Subwords(str(out))
    newline, carriage = (subwords._processor.piece_to_id(f'<0x0{x}>') for x in 'AD')
    (tokens,) = subwords.encode(['ein Hund'])
    tokens = [*tokens[:-1], newline, carriage, *tokens]
    assert subwords.decode(tokens).replace(' ', '') == 'einHundeinHund'


def test_a_test_keeps_every_pair_or_refuses(build, warnings):
    data = build(b'ein\n\n', b'one\ntwo\n', test_mode=True)
    assert len(data) == 2 and data[1]['data_samples'].source.tolist() == [data.subwords.end]
    assert not warnings
    message = r'max_length must be large enough .* 1 of .* longer than 4 subwords \(line 2\); raise'
    with pytest.raises(ValueError, match=message):
        build(b'ein\nHund Hund Hund Hund\n', b'one\nx\n', max_length=4, test_mode=True)


def test_lines_that_do_not_match_in_number_end_in_one_sentence(build):
    refuses('equally many lines, got 3 of .*a. and 2 of', build, b'a\nb\nc', b'a\nb\n')
    refuses('have no pair that can be used', build, b'\n\n', b'a\nb\n')


def test_bytes_that_are_no_text_are_replaced_and_said(build, warnings):
    data = build(b'Stra\xdfe\nein\n', b'street\none\n')
    assert len(data) == 2
    assert 'not valid UTF-8 in line 1, 1 in all' in warnings[0]


def test_a_byte_order_mark_is_no_part_of_a_sentence(build, warnings):
    one, two = '\ufeffein Hund\r\nrot\n\ufeffzwei\n', '\ufeffone dog\nred\ntwo\n'
    data = build(one.encode(), two.encode(), test_mode=True)
    assert data.references == ['one dog', 'red', 'two'] and not warnings
    sources = [data.subwords.decode(pair['data_samples'].source) for pair in data]
    assert sources == ['ein Hund', 'rot', 'zwei']
    assert split_lines(b'\xef\xbb\xbfa \xff') == (['a \ufffd'], [1])


@pytest.mark.parametrize(
    ('text', 'found'),
    [
        ('ein\nzwei\n'.encode('utf-16-le'), 'zero bytes, as in UTF-16'),
        ('犬\n赤\n'.encode('utf-16-le'), 'zero bytes, as in UTF-16'),
        (b'<srcset setid="a" srclang="any">\n<seg id="1">ein</seg>\n', 'markup, <srcset …'),
        (b'\xef\xbb\xbf<?xml version="1.0"?>\n<tmx/>\n', r'markup, <\?xml …'),
        (b'\n <DOC sysid="ref">\nein\n', 'markup, <DOC …'),
        (b'<seg id="1"> ein </seg>\nzwei\n', 'markup, <seg …'),
        (b'<url>http://a.b</url>\nein\n', 'markup, <url> …'),
    ],
)
def test_files_that_are_no_sentences_are_refused(build, text, found):
    refuses(f"/b' must be sentences in UTF-8, one per line, got {found}$", build, b'ein\n', text)
    data = build(b'<url> ein\n<seg>\n', b'<doc>\n<2de> one\n', test_mode=True)
    assert data.references == ['<doc>', '<2de> one']  # placeholders


def test_characters_without_a_subword_are_named(build, warnings, tmp_path):
    source = 'ein\n€ rot Ž €\n' + 'Žebra\n' * 7
    for again in range(2):
        target = b'one\nred\ndog 7\n' + b'dog\n' * 6
        build(source.encode(), target, cache_dir=str(tmp_path / 'cache'))
        first, second = warnings[2 * again :]
        assert first.endswith(
            "/a' has characters without a subword, '€Ž', in lines 2, 3, 4, 5, 6, …, 8 in all; "
            'they become <unk>'
        )
        assert "/b' has characters without a subword, '7', in line 3, 1 in all" in second


def test_only_newlines_end_a_line():
    text = 'a\u2028b\x85c\x0bd\r\n\ne\rf'
    assert split_lines(text.encode()) == (['a\u2028b\x85c\x0bd', '', 'e\rf'], [])
    assert split_lines(b'') == ([], []) and split_lines(b'\n') == ([''], [])


def test_subwords_of_the_same_text_are_the_same_and_lose_nothing(pairs, tmp_path):
    write_subwords(pairs, tmp_path / 'again.model')
    one, other = Subwords(pairs / 'subwords.model'), Subwords(tmp_path / 'again.model')
    assert one.fingerprint == other.fingerprint
    lines = [line for side in sentences(50, seed=3) for line in side]
    assert [one.decode(tokens) for tokens in one.encode(lines)] == lines
    assert one.encode(['']) == [[one.end]] and one.decode([one.end, 5, 6]) == ''
    # Characters that the training text does not have.
    text = 'ein Žebra €5 €6'
    assert one.unknown(text) == 'Ž€56' and one.decode(one.encode([text])[0]) != text
    words = [str(pairs / 'train.de'), str(pairs / 'train.en'), '--vocab-size', '320']
    command('convert subwords')([*words, '--out', str(tmp_path / 'b.model')])
    wide = Subwords(tmp_path / 'b.model')
    assert wide.unknown(text) == '' and wide.decode(wide.encode([text])[0]) == text


@pytest.mark.parametrize(
    ('size', 'out', 'message'),
    [
        ('64', 'a.txt', '--out must end in .model'),
        ('0', 'a.model', '--vocab-size must be an int, 1 or larger, got 0'),
        ('9999', 'a.model', '--vocab-size 9999 is not possible for the text'),
    ],
)
def test_bad_arguments_of_the_converter_end_in_one_sentence(
    pairs, tmp_path, monkeypatch, size, out, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f'Error: {message}') as error:
        command('convert subwords')([str(pairs / 'train.de'), '--vocab-size', size, '--out', out])
    assert '\n' not in str(error.value) and not list(tmp_path.iterdir())


def test_a_missing_library_is_named(pairs, monkeypatch):
    monkeypatch.setitem(sys.modules, 'sentencepiece', None)
    with pytest.raises(ValueError, match=r'subwords need sentencepiece, which pip install aft_mm'):
        Subwords(pairs / 'subwords.model')
    stops('^Error: subwords need sentencepiece', write_subwords, pairs, pairs / 'b.model')


def test_a_file_that_is_no_vocabulary_is_named(tmp_path):
    (tmp_path / 'a.model').write_bytes(b'no model')
    refuses("a.model' is no model of sentencepiece", Subwords, tmp_path / 'a.model')
    refuses("b.model' does not exist; `aft_mm convert subw", Subwords, tmp_path / 'b.model')


def test_encoded_text_is_cached_for_the_text_and_the_vocabulary(build, tmp_path, monkeypatch):
    options = dict(cache_dir=str(tmp_path / 'cache'))
    first = build(b'ein Hund\nzwei\n', b'one dog\ntwo\n', **options)
    assert len(list((tmp_path / 'cache').glob('*.npz'))) == 2

    def refuse(*args):
        raise AssertionError('the text is encoded again')

    monkeypatch.setattr('aft_mm.datasets.texts.encode', refuse)
    second = build(b'ein Hund\nzwei\n', b'one dog\ntwo\n', **options)
    for index in range(2):
        assert torch.equal(first[index]['inputs'], second[index]['inputs'])
    assert (first.lengths == second.lengths).all()
    with pytest.raises(AssertionError, match='encoded again'):
        build(b'ein Mann\nzwei\n', b'one man\ntwo\n', **options)
    lines = ['ein Hund', 'zwei']
    encode_cached(lines, first.subwords, options['cache_dir'])
    with pytest.raises(AssertionError, match='encoded again'):
        encode_cached(lines, SimpleNamespace(fingerprint='another'), options['cache_dir'])


@pytest.mark.parametrize(
    'damage', [lambda data: b'', lambda data: data[:-40], lambda data: b'text']
)
def test_a_damaged_cache_is_written_again(build, tmp_path, damage):
    options = dict(cache_dir=str(tmp_path / 'cache'))
    first = build(b'ein Hund\nzwei\n', b'one dog\ntwo\n', **options)
    sizes = {}
    for path in (tmp_path / 'cache').glob('*.npz'):
        sizes[path] = path.stat().st_size
        path.write_bytes(damage(path.read_bytes()))
    second = build(b'ein Hund\nzwei\n', b'one dog\ntwo\n', **options)
    assert (first.lengths == second.lengths).all()
    assert {path: path.stat().st_size for path in sizes} == sizes and len(sizes) == 2


def test_a_cache_that_cannot_be_written_is_a_warning(build, tmp_path, warnings):
    (tmp_path / 'file').write_text('')
    data = build(b'ein Hund\n', b'one dog\n', cache_dir=str(tmp_path / 'file'))
    assert len(data) == 1 and 'cannot be used' in warnings[0]
