"""``aft_mm convert wmt14``: archives to text files."""

import io
import re
import tarfile

import pytest

from ..errors import stops
from ..helpers import command

SGM = (
    '<srcset setid="newstest2014">\n<doc>\n<seg id="1"> A &amp; B </seg>\n'
    '<seg id="2">two\nlines</seg>'
)
MEMBERS = {
    'europarl.tgz': {
        'training/europarl-v7.de-en.de': b'eins\nzwei',
        'training/europarl-v7.de-en.en': b'one\ntwo\n',
        'training/europarl-v7.fr-en.en': b'no\n',
    },
    'crawl.tgz': {
        'commoncrawl.de-en.de': 'dr\u2028ei\n'.encode(),
        'commoncrawl.de-en.en': b'three\n',
    },
    'nc.tgz': {
        'training/news-commentary-v9.de-en.de': b'vier\n',
        'training/news-commentary-v9.de-en.en': b'four\n',
    },
    'dev.tgz': {'dev/newstest2013.de': b'fuenf\n', 'dev/newstest2013.en': b'five\n'},
    'test.tgz': {
        'test-full/newstest2014-deen-src.en.sgm': SGM.encode(),
        'test-full/newstest2014-deen-ref.de.sgm': SGM.replace('two', 'Über').encode(),
    },
}


@pytest.fixture
def archives(tmp_path):
    def call(**changes):
        for name, members in MEMBERS.items():
            with tarfile.open(tmp_path / name, 'w:gz') as archive:
                for path, content in members.items():
                    content = changes.get(re.sub('[.-]', '_', path.split('/')[-1]), content)
                    if content is not None:
                        info = tarfile.TarInfo(path)
                        info.size = len(content)
                        archive.addfile(info, io.BytesIO(content))
        return [str(tmp_path / name) for name in MEMBERS]

    return call


def test_the_parts_become_three_pairs_of_files(archives, tmp_path, capsys):
    command('convert wmt14')([*reversed(archives()), '--out', str(tmp_path / 'out')])
    found = {path.name: path.read_text(encoding='utf-8') for path in (tmp_path / 'out').iterdir()}
    assert found == {
        'train.de': 'eins\nzwei\ndr\u2028ei\nvier\n',
        'train.en': 'one\ntwo\nthree\nfour\n',
        'val.de': 'fuenf\n',
        'val.en': 'five\n',
        'test.en': 'A & B\ntwo lines\n',
        'test.de': 'A & B\nÜber lines\n',
    }
    assert 'wrote 4 pairs to' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            dict(commoncrawl_de_en_de=None),
            r'the archives must hold commoncrawl.de-en.\* in both languages',
        ),
        (dict(newstest2013_de=b'a\nb\n'), 'got 1 in English and 2 in German'),
        (dict(), 'archive .*none.tgz. does not exist'),
        (None, 'archive .*europarl.tgz. is damaged'),
    ],
)
def test_missing_or_damaged_archives_are_reported_and_nothing_is_written(
    archives, tmp_path, changes, message
):
    paths = archives(**(changes or {}))
    if changes == {}:
        paths.append(str(tmp_path / 'none.tgz'))
    if changes is None:
        content = open(paths[0], 'rb').read()
        open(paths[0], 'wb').write(content[: len(content) // 2])
    words = [*paths, '--out', str(tmp_path / 'out')]
    stops(f'^Error: .*{message}', command('convert wmt14'), words)
    assert not (tmp_path / 'out').exists()
