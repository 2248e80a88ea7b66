"""Small files that expand, and configs that are not what they look like."""

import gzip
import os
import time
import zipfile
from pathlib import Path

import pytest

from aft_mm.config.reading import read_config
from aft_mm.datasets import TextFile

from ..errors import refuses, stops

pytestmark = pytest.mark.adversarial
MEGABYTES = 50


@pytest.fixture(autouse=True)
def quickly():
    """Fail a test that takes long: a file must be refused before it fills the memory."""
    start = time.process_time()  # other processes may be busy
    yield
    assert time.process_time() - start < 10


def test_a_text_that_is_no_text_is_refused(tmp_path):
    (tmp_path / 'text.gz').write_bytes(gzip.compress(bytes(MEGABYTES * 2**20)))
    with pytest.raises(ValueError, match="text.gz' must have at most 5,0.* when decompressed"):
        TextFile(str(tmp_path / 'text.gz'))


def test_a_text_for_a_config_is_read_up_to_a_bound(tool, here):
    Path('text.gz').write_bytes(gzip.compress(bytes(MEGABYTES * 2**20)))
    limit = (
        "text '.*text.gz' must have at most 5,0.* when decompressed, 100 times its size, got more"
    )
    stops(limit, tool('new').main, ['text', 'text.gz'])
    Path('text.gz').write_bytes(gzip.compress(b'a text')[:-1])
    stops("text '.*text.gz' is not a whole gzip file", tool('new').main, ['text', 'text.gz'])


def test_the_archive_of_enwik8_is_unpacked_to_its_length_at_most(tool, here, monkeypatch):
    with zipfile.ZipFile('a.zip', 'w', zipfile.ZIP_DEFLATED) as file:
        file.writestr('enwik8', bytes(MEGABYTES * 2**20))
    Path('a.gz').write_bytes(gzip.compress(bytes(MEGABYTES * 2**20)))
    unpacked, converter = [], tool('convert enwik8')

    def counted(*args, read=converter.read):
        unpacked.append(len(content := read(*args)))
        return content

    monkeypatch.setattr(converter.module, 'read', counted)
    for name in ('a.zip', 'a.gz'):
        with pytest.raises(SystemExit, match='must have 1,000 bytes, but .* holds more'):
            converter.main([name, 'out', '--size', '1000'])
        assert not Path('out').exists()
    assert unpacked == [1001, 1001]


@pytest.mark.parametrize(
    ('name', 'text'),
    [
        ('evil.yaml', '!!python/object/apply:os.mkdir [ran]'),
        ('evil.yml', 'model: !!python/object/apply:os.mkdir [ran]'),
        ('evil.json', '{}'),
    ],
)
def test_configs_that_look_like_data_are_not_read(name, text, here):
    Path(name).write_text(text)
    refuses(f"config '{name}' must be a Python file", read_config, name)
    assert os.listdir() == [name]


@pytest.mark.parametrize(
    'folder',
    [
        *("it's", '"quoted"', 'back\\slash\\', 'a\\nb', 'a\nb\r', "'''", '{{ _base_.x }}'),
        *("'+__import__('os').mkdir('ran')+'", '{{$QQ:(?s:.*)}}', r'\x7b\g<0>'),
    ],
)
@pytest.mark.parametrize('quote', ["'", '"'])
def test_a_data_folder_of_any_name(folder, quote, here, monkeypatch):
    monkeypatch.setenv('AFT_MM_DATA', folder)
    Path('base.py').write_text(f'data_root = {quote}{{{{$AFT_MM_DATA:data}}}}/images{quote}\n')
    Path('config.py').write_text("_base_ = 'base.py'\n")
    for name in ('base.py', 'config.py'):
        assert read_config(name).data_root == f'{folder}/images'
    assert os.environ['AFT_MM_DATA'] == folder
    assert sorted(os.listdir()) == ['base.py', 'config.py']
