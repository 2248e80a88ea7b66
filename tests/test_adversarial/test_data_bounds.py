"""Claims of a file are checked: lengths, rates, sizes of masks, sparse and packed archives."""

import gzip
import importlib
import io
import json
import os
import signal
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from mmengine.config import ConfigDict

from aft_mm.config.boxes import check_boxes
from aft_mm.convert import wmt14
from aft_mm.datasets import (
    CelebA,
    KaldiFeatures,
    SpeechFolder,
    TextFile,
    UnusableFile,
    read_rgb,
    read_transcripts,
)
from aft_mm.datasets.sound_files import (
    MAX_SAMPLES,
    filter_banks,
    num_kaldi_frames,
    read_header,
    read_sound,
)

from ..errors import refuses, refuses_input

pytestmark = pytest.mark.adversarial
PIPELINE = [dict(type='aft_mm.LoadUtterance')]
rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def quickly():
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail('the reader hangs'))
    signal.alarm(60)
    start = time.process_time()  # other processes may be busy
    yield
    signal.alarm(0)
    assert time.process_time() - start < 10


# Sound.


def sound(path, rate=16000, samples=None, **options):
    soundfile = pytest.importorskip('soundfile', reason='soundfile writes the sound of this test')
    samples = rng.normal(size=4000) * 0.1 if samples is None else samples
    soundfile.write(path, np.float32(samples), rate, **options)
    return str(path)


def flac(path, announced, samples=None):
    """A FLAC file, by default of 20,000 samples, whose header claims another number."""
    noise = np.random.default_rng(1).normal(size=20_000) * 0.1
    sound(path, samples=noise if samples is None else samples)
    data = bytearray(path.read_bytes())
    field = int.from_bytes(data[18:26], 'big')  # the last 36 bits are the number of samples
    data[18:26] = (field >> 36 << 36 | announced).to_bytes(8, 'big')
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize(
    ('rate', 'message'),
    [
        (96_001, "a.wav' has 96001 samples per second, which cannot be resampled to 16000: "),
        (70_001, 'largest common divisor is 1$'),
        (999, "a.wav' must have 1000 to 384000 samples per second, got 999"),
        (2_000_000_000, "a.wav' must have 1000 to 384000 samples per second"),
    ],
)
def test_a_rate_without_a_common_divisor_takes_no_memory(rate, message, tmp_path):
    path = sound(tmp_path / 'a.wav', rate, rng.normal(size=400) * 0.1)
    for read in (read_sound, read_header):
        with pytest.raises(UnusableFile, match=message):
            read(path, 16000)


def test_a_flac_file_is_as_long_as_its_samples(tmp_path):
    whole = read_sound(flac(tmp_path / 'whole.flac', 20_000), 16000)[0]
    streamed = flac(tmp_path / 'streamed.flac', 0)
    np.testing.assert_array_equal(read_sound(streamed, 16000)[0], whole)
    assert read_header(streamed, 16000) == (123, 16000)
    longer = flac(tmp_path / 'longer.flac', 2**36 - 1)
    for read in (read_sound, read_header):
        with pytest.raises(UnusableFile, match="longer.flac' must have at most 67,108,864 samples"):
            read(longer, 16000)
    with pytest.raises(UnusableFile, match="cut.flac' is damaged: 30000 samples announced, 20000"):
        read_sound(flac(tmp_path / 'cut.flac', 30_000), 16000)


def test_a_flac_file_of_hours_of_silence_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr('aft_mm.datasets.sound_files.MAX_SAMPLES', 2**21)
    path = flac(tmp_path / 'silence.flac', 0, samples=np.zeros(2**22))
    assert os.path.getsize(path) < 2**16 < MAX_SAMPLES
    with pytest.raises(UnusableFile, match="silence.flac' has more than 2,097,152 samples"):
        read_sound(path, 16000)


def test_samples_far_beyond_full_scale(tmp_path):
    loud = np.full(4000, 3e38)
    path = sound(tmp_path / 'loud.wav', samples=loud, subtype='FLOAT')
    with pytest.raises(UnusableFile, match=r"loud.wav' must have samples within ±1, got 3e\+38"):
        read_sound(path, 16000)
    path = sound(tmp_path / 'a.wav', samples=np.full(4000, 32767.0), subtype='FLOAT')
    assert np.isfinite(filter_banks(read_sound(path, 16000)[0], 16000)).all()


def test_a_pipe_among_sound_files_is_left_out(tmp_path):
    sound(tmp_path / 'a.wav')
    os.mkfifo(tmp_path / 'b.wav')
    os.mkfifo(tmp_path / 'b.png')
    (tmp_path / 'text').write_text('a one\nb two\n')
    data = SpeechFolder(str(tmp_path), units=dict(symbols=' enotw'), pipeline=PIPELINE)
    assert [data.get_data_info(i)['name'] for i in range(len(data))] == ['a']
    with pytest.raises(UnusableFile, match="b.png' cannot be read: it is not a regular file"):
        read_rgb(tmp_path / 'b.png')


def test_parts_of_a_long_sound_have_the_frames_of_the_whole(monkeypatch):
    samples = np.float32(rng.normal(size=16000) * 0.1)
    whole = filter_banks(samples, 16000)
    for num_frames in (1, 7, 49, 97, 98, 99):
        monkeypatch.setattr('aft_mm.datasets.sound_files._FRAMES', num_frames)
        np.testing.assert_allclose(filter_banks(samples, 16000), whole, atol=1e-4)


# Texts.


def test_a_line_of_brackets_takes_linear_time(tmp_path):
    path = tmp_path / 'text'
    path.write_text('a (1)\n' + '(' * 500_000 + '\nb (2)\n')
    refuses('line 2 of .* must end with an id in brackets', read_transcripts, str(path))
    path.write_text('(' + 'a' * 500_000 + ')')
    refuses("line 1 .* an id of at most 1000 characters .* got '", read_transcripts, str(path))
    path.write_text('a ' * 2**20)
    refuses('line 1 .* at most 1,048,576 characters, got 2,097,', read_transcripts, str(path))


@pytest.mark.parametrize(
    ('line', 'parts'),
    [
        ('one (two) (a)', ('a', 'one (two)')),
        ('one (a))', ('a)', 'one')),
        ('one (a()', ('a(', 'one')),
        ('(a)', ('a', '')),
        ('one ()', None),
        ('one (a b)', None),
        ('one (a) two', None),
    ],
)
def test_brackets_of_sphinx(line, parts, tmp_path):
    (tmp_path / 'text').write_text(f'first (1)\n{line}\nlast (3)\n')
    if parts is None:
        refuses('line 2 of transcripts', read_transcripts, str(tmp_path / 'text'))
    else:
        found = read_transcripts(str(tmp_path / 'text'))[0]
        assert [*found.items()] == [('1', 'first'), parts, ('3', 'last')]


@pytest.mark.parametrize('name', ['a\0b', 100_000 * 'a'])
def test_ids_that_are_no_names_of_files(name, tmp_path):
    (tmp_path / 'text').write_text(f'{name} one two\n')
    with pytest.raises(ValueError, match='line 1 of transcripts .* must have an id') as error:
        read_transcripts(str(tmp_path / 'text'))
    assert len(str(error.value)) < 500


@pytest.mark.parametrize('place', ['a.ark:' + 23 * '9', 'a\0.ark:5', 999 * 'a' + '.a:5', 'a.ark:²'])
def test_places_that_no_archive_has(place, here):
    with pytest.raises(UnusableFile, match='(must be FILE|cannot be read)') as error:
        num_kaldi_frames(place)
    assert len(str(error.value)) < 500
    Path('feats.scp').write_text(f'utt {place}\n')
    Path('text').write_text('utt one\n')
    data = KaldiFeatures('.', units=dict(symbols='eno'), lazy_init=True, pipeline=PIPELINE)
    refuses('has no utterance that can be used', data.full_init)


def test_a_text_that_is_cut_while_it_is_read(tmp_path):
    path = tmp_path / 'text'
    path.write_bytes(rng.bytes(100_000))
    data = TextFile(str(path), 'test', context_length=100)
    assert data[40]['inputs'].tolist() == list(path.read_bytes()[99_000:99_100])
    os.truncate(path, 50_000)
    with pytest.raises(ValueError, match="text' has become shorter since it was opened"):
        data[40]
    path.unlink()
    with pytest.raises(ValueError, match="text' cannot be read: No such file"):
        data[40]


def test_a_list_of_celeba_in_another_encoding(tmp_path):
    (tmp_path / 'img_align_celeba').mkdir()
    (tmp_path / 'list_eval_partition.txt').write_bytes('é.jpg 0\n'.encode('latin-1'))
    refuses('list_eval_partition.txt is not valid UTF-8 in byte 0$', CelebA, str(tmp_path))


# Archives.


def archive(path, names, data=b'', kind=tarfile.REGTYPE, **headers):
    with tarfile.open(path, 'w:gz' if path.suffix == '.tgz' else 'w', **headers) as file:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.type = len(data), kind
            file.addfile(member, io.BytesIO(data))
    return path


def test_archives_that_expand_beyond_their_size(tmp_path):
    bomb = archive(tmp_path / 'bomb.tgz', ['europarl-v7.de-en.en'], bytes(2**26))
    assert bomb.stat().st_size < 10**5
    other = archive(tmp_path / 'other.tgz', ['no part of it'], bytes(2**26))
    for path in (bomb, other):
        message = f"{path.name}' is damaged: it expands to more than 100 times its size"
        refuses_input(message, wmt14.read, [path])


def test_a_sparse_archive(tmp_path):
    info = tarfile.TarInfo('europarl-v7.de-en.en')
    info.size = 512
    info.type = tarfile.GNUTYPE_SPARSE
    head = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    head[386:410] = b'%011o\0%011o\0' % (0, 512)  # 512 bytes at 0
    head[483:495] = b'%011o\0' % (60 * 10**9 % 8**11)  # of many gigabytes
    head[148:156] = b'        '
    head[148:156] = b'%06o\0 ' % sum(head)
    path = tmp_path / 'sparse.tar'
    path.write_bytes(bytes(head) + bytes(512) + bytes(1024))
    refuses_input("sparse.tar' is damaged: europarl.* is a sparse file", wmt14.read, [path])


def test_segments_without_an_end_take_linear_time():
    assert wmt14.text_of(b'<seg>' * 200_000, 'a.sgm') == b''
    assert wmt14.text_of(b'<seg' * 200_000 + b'</seg>', 'a.sgm') == b''
    text = b'<seg id="1">a\n &amp; b</seg> <SEG>c</SEG></seg>'
    assert wmt14.text_of(text, 'a.sgm') == b'a & b\nc\n'


def test_mnist_that_expands_beyond_its_size(tmp_path, monkeypatch):
    module = importlib.import_module('aft_mm.datasets.small_images')
    monkeypatch.setattr(module, 'SMALL', 2**20)
    header = bytes([0, 0, 8, 1]) + struct.pack('>i', 2**24)
    (tmp_path / 'a.gz').write_bytes(gzip.compress(header + bytes(2**24)))
    with pytest.raises(ValueError, match="a.gz' must have at most 1,.* bytes when decompressed"):
        module.read_idx(tmp_path / 'a', 1)


# Boxes and masks.


def boxes(tmp_path, **changes):
    box = dict(id=1, image_id=7, category_id=1, bbox=[1, 1, 4, 4], area=16, segmentation=[])
    image = dict(id=7, file_name='a.png', height=6, width=8)
    for key, value in changes.items():
        (image if key in image else box)[key] = value
    whole = dict(images=[image], annotations=[box], categories=[dict(id=1, name='cat')])
    (tmp_path / 'boxes.json').write_text(json.dumps(whole))
    config = dict(type='CocoDataset', ann_file='boxes.json', metainfo=dict(classes=('cat',)))
    check_boxes('dataset', str(tmp_path), ConfigDict(config))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(segmentation=dict(size=[100_000, 100_000], counts=[10**10])), 'of size .6, 8., got'),
        (dict(segmentation=dict(size=[6, 8], counts=[10**10])), 'run lengths that sum to 48'),
        (dict(segmentation=dict(size=[6, 8], counts=[-1, 49])), 'run lengths that sum to 48'),
        (dict(segmentation=[[1, 1, 1e300, 1, 5, 5]]), 'polygons, lists of numbers of at most'),
        (dict(segmentation='all'), "must have polygons or run lengths, got 'all'"),
        (dict(bbox=[0, 0, 1e12, 1]), 'must have a box of four numbers'),
        (dict(bbox=[0, 0, float('nan'), 1]), 'must have a box of four numbers'),
        (dict(area='16'), 'has no area'),
        (dict(file_name='s3://bucket/a.png'), 'must have the name of a local file'),
        (dict(file_name='http://host/a.png'), 'must have the name of a local file'),
        (dict(height=10**6, width=10**6), 'must have a height and width'),
        (dict(image_id=[7]), 'must have the id of an image'),
    ],
)
def test_annotations_are_checked_before_training(changes, message, tmp_path):
    refuses_input(f"of '.*boxes.json' .*{message}", boxes, tmp_path, **changes)


def test_whole_annotations_pass(tmp_path):
    boxes(tmp_path)
    boxes(tmp_path, segmentation=dict(size=[6, 8], counts=[40, 8]))
    boxes(tmp_path, segmentation=dict(size=[6, 8], counts='XX'))
    boxes(tmp_path, segmentation=[[1, 1, 4.5, 1, 4.5, 5]], iscrowd=0)
    message = r'1 of 1 boxes are not used: of images that the file does not list \(1\)'
    refuses_input(message, boxes, tmp_path, image_id=8)


# Commands.


def test_the_quickstart_does_not_import_the_current_folder(root, tmp_path):
    from aft_mm.cli.commands import quickstart

    for name in ('argparse.py', 'fractions.py'):
        (tmp_path / name).write_text('open("ran", "w").close()\n')
    (tmp_path / 'scripts').mkdir()
    (tmp_path / 'scripts/start.py').write_text(
        'from aft_mm.cli.commands.quickstart import call\ncall("aft_mm", "list", "quickstart")\n'
    )
    done = subprocess.run(
        [sys.executable, 'scripts/start.py'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, 'PYTHONPATH': str(root)},
    )
    assert done.returncode == 0, done.stderr
    assert quickstart.NAME in done.stdout
    assert not (tmp_path / 'ran').exists()


def test_a_limit_on_memory_is_reported(tmp_path):
    done = subprocess.run(
        ['bash', '-c', f'ulimit -v 400000; {sys.executable} -P -m aft_mm train no_config.py'],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith('Error: ') and done.stderr.count('\n') == 1, done.stderr
