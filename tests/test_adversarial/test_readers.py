"""Every reader of files, with damaged files: no hang, no crash, no traceback, the file is named.

Each reader runs in a child with a limit on memory and time. A case is read, or refused with a
one-line ValueError or UnpicklingError that contains the name of the file.
"""

import gzip
import io
import json
import lzma
import multiprocessing
import os
import pickle
import re
import resource
import signal
import struct
import tarfile
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from PIL import Image

from aft_mm.checkpoint import load_from_local
from aft_mm.checkpoint.safetensors import write_safetensors
from aft_mm.config import boxes
from aft_mm.config.reading import read_config
from aft_mm.convert import enwik8, shapenet, wmt14
from aft_mm.datasets import (
    CIFAR10Binary,
    MNISTIdx,
    TextFile,
    read_lines,
    read_points,
    read_rgb,
    read_transcripts,
)
from aft_mm.datasets.image_files import read_partition
from aft_mm.datasets.sound_files import filter_banks, read_kaldi, read_mfc, read_sound
from aft_mm.tokenizers import Subwords, read_lexicon

pytestmark = pytest.mark.adversarial
MEMORY = 2**30  # bytes, in addition to those of the process
SECONDS = 20  # per case; all but a hang take milliseconds
REFUSED = (ValueError, FileNotFoundError, pickle.UnpicklingError)
rng = np.random.default_rng(0)


class Reader(NamedTuple):
    make: Callable[[Path], None]
    read: Callable[[Path], object]


def checkpoint(path: Path, **options) -> None:
    state = dict(state_dict=dict(weight=torch.randn(9, 9)), meta=dict(epoch=1, names=['a', 'b']))
    torch.save(state, path, **options)


def safetensors(path: Path) -> None:
    with path.open('wb') as file:
        write_safetensors(file, dict(state_dict=dict(weight=torch.randn(9, 9)), meta={}))


def image(path: Path) -> None:
    x, y = np.mgrid[:24, :16]
    Image.fromarray(np.stack([x, y, x + y], -1).astype(np.uint8) * 6).save(path)


def points(path: Path) -> None:
    cloud = rng.normal(size=(20, 3)).astype('f4')
    if path.suffix == '.npy':
        np.save(path, cloud)
    elif path.suffix == '.xyz':
        np.savetxt(path, cloud)
    elif path.suffix == '.ply':
        binary = 'binary' in path.name
        kind = 'binary_little_endian' if binary else 'ascii'
        axes = ''.join(f'property float {axis}\n' for axis in 'xyz')
        header = f'ply\nformat {kind} 1.0\nelement vertex 20\n{axes}end_header\n'
        rows = ''.join('{:.4f} {:.4f} {:.4f}\n'.format(*row) for row in cloud)
        path.write_bytes(header.encode() + (cloud.tobytes() if binary else rows.encode()))
    else:
        from pypcd4 import Encoding, PointCloud

        PointCloud.from_xyz_points(cloud).save(path, encoding=Encoding(path.stem))


def sound(path: Path) -> None:
    soundfile = pytest.importorskip('soundfile', reason='soundfile writes the sound of this test')
    soundfile.write(path, rng.normal(size=4000).astype('f4') * 0.1, 16000)


def listen(path: Path) -> None:
    filter_banks(read_sound(str(path), 8000)[0], 8000)


def kaldi(path: Path) -> None:
    rows = rng.normal(size=(9, 5)).astype('<f4')
    path.write_bytes(b'a \0BFM ' + struct.pack('<bibi', 4, 9, 4, 5) + rows.tobytes())


def kaldi_compressed(path: Path) -> None:
    head = struct.pack('<ffii', -1.0, 2.0, 9, 5)
    columns = struct.pack('<4H', 0, 9000, 30000, 65535) * 5
    path.write_bytes(b'a \0BCM ' + head + columns + rng.bytes(45))


def sphinx(path: Path) -> None:
    path.write_bytes(struct.pack('>i', 65) + rng.normal(size=65).astype('>f4').tobytes())


def subwords(path: Path) -> None:
    sentencepiece = pytest.importorskip(
        'sentencepiece', reason='sentencepiece trains the vocabulary of this test'
    )
    model = io.BytesIO()
    words = ['one two three four five six', 'a b c d e f g h i j k l m n o p q r s t u v']
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(9 * words),
        model_writer=model,
        model_type='bpe',
        vocab_size=40,
        normalization_rule_name='nmt_nfkc_cf',
        eos_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())


def use_subwords(path: Path) -> None:
    vocabulary = Subwords(str(path))
    vocabulary.decode(vocabulary.encode(['one two Ünknown ﬁ', ''])[0])


def mnist(path: Path) -> None:
    axes = (6, 4, 3) if 'idx3' in path.name else (6,)
    header = bytes([0, 0, 8, len(axes)]) + np.array(axes, '>i4').tobytes()
    data = header + rng.integers(10, size=axes, dtype=np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)
    if 'idx3' in path.name:
        mnist(path.with_name('train-labels-idx1-ubyte'))


def read_mnist(path: Path) -> None:
    MNISTIdx(str(path.parent), lazy_init=True).load_data_list()


def cifar(path: Path) -> None:
    records = rng.integers(256, size=(2, 3073), dtype=np.uint8)
    records[:, 0] = 3
    path.write_bytes(records.tobytes())


def coco(path: Path) -> None:
    square = [[1, 1, 5, 1, 5, 5]]
    box = dict(id=1, image_id=7, category_id=1, bbox=[1, 1, 4, 4], area=16, segmentation=square)
    runs = dict(box, id=2, iscrowd=1, segmentation=dict(size=[6, 8], counts=[40, 8]))
    whole = dict(
        images=[dict(id=7, file_name='a.png', height=6, width=8)],
        annotations=[box, runs],
        categories=[dict(id=1, name='cat')],
    )
    path.write_text(json.dumps(whole))


def check_boxes(path: Path) -> None:
    config = dict(type='CocoDataset', ann_file=path.name, metainfo=dict(classes=('cat',)))
    if path.suffix == '.xml':
        (path.parent / 'list.txt').write_text(path.stem)
        config.update(type='VOCDataset', ann_file='list.txt', ann_subdir='')
    boxes.check_boxes('train_dataloader.dataset', str(path.parent), ConfigDict(config))


def voc(path: Path) -> None:
    box = '<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>4</ymax></bndbox>'
    path.write_text(f'<annotation><object><name>cat</name>{box}</object></annotation>')


def archive(path: Path) -> None:
    names = ['europarl-v7.de-en', 'commoncrawl.de-en', 'news-commentary-v9.de-en', 'newstest2013']
    texts = {f'{name}.{side}': b'a\nb\n' for name in names for side in ('en', 'de')}
    for side, kind in (('en', 'src'), ('de', 'ref')):
        name = f'newstest2014-deen-{kind}.{side}.sgm'
        texts[name] = b'<seg id="1">a &amp; b</seg>\n<seg id="2">c</seg>\n'
    with tarfile.open(path, 'w:gz' if path.suffix == '.tgz' else 'w') as file:
        for name, text in texts.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            file.addfile(member, io.BytesIO(text))


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as file:
        file.writestr('enwik8', b'text ' * 20)


def write(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data)  # type: ignore[return-value]


def readers() -> dict[str, Reader]:
    found = {
        'a.pth': Reader(checkpoint, lambda path: load_from_local(str(path))),
        'old.pth': Reader(
            lambda path: checkpoint(path, _use_new_zipfile_serialization=False),
            lambda path: load_from_local(str(path)),
        ),
        'a.safetensors': Reader(safetensors, lambda path: load_from_local(str(path))),
        'a.ark': Reader(kaldi, lambda path: read_kaldi(f'{path}:2')),
        'compressed.ark': Reader(kaldi_compressed, lambda path: read_kaldi(f'{path}:2')),
        'a.mfc': Reader(sphinx, lambda path: read_mfc(str(path))),
        'text': Reader(
            write(b'utt-1 one two\nutt-2 three\n'), lambda path: read_transcripts(str(path))
        ),
        'sphinx.transcription': Reader(
            write(b'<s> one two </s> (utt-1)\nthree (utt-2)\n'),
            lambda path: read_transcripts(str(path)),
        ),
        'words.dic': Reader(
            write(b'A  AH0\nA(2)  EY1\nTWO T UW1\n'), lambda path: read_lexicon(str(path))
        ),
        'subwords.model': Reader(subwords, use_subwords),
        'plain.txt': Reader(
            write(b'one\ntwo\n\xc3\xa9\n' * 20),
            lambda path: (TextFile(str(path), context_length=4)[0], read_lines(str(path))),
        ),
        'packed.gz': Reader(
            write(gzip.compress(b'one\ntwo\n\xc3\xa9\n' * 20)),
            lambda path: (TextFile(str(path), context_length=4)[0], read_lines(str(path))),
        ),
        'train-images-idx3-ubyte': Reader(mnist, read_mnist),
        'train-images-idx3-ubyte.gz': Reader(mnist, read_mnist),
        'cifar-10-batches-bin/test_batch.bin': Reader(
            cifar,
            lambda path: CIFAR10Binary(
                str(path.parent.parent), 'test', lazy_init=True
            ).load_data_list(),
        ),
        'cifar-10-batches-bin/test_batch.bin.xz': Reader(
            lambda path: path.write_bytes(lzma.compress(bytes(3073))),
            lambda path: CIFAR10Binary(
                str(path.parent.parent), 'test', lazy_init=True
            ).load_data_list(),
        ),
        'list_eval_partition.txt': Reader(write(b'1.jpg 0\n2.jpg 1\n'), read_partition),
        'boxes.json': Reader(coco, check_boxes),
        'boxes.xml': Reader(voc, check_boxes),
        'config.yml': Reader(write(b'model: 1\n'), lambda path: read_config(str(path))),
        'a.tgz': Reader(archive, lambda path: wmt14.read([path])),
        'a.tar': Reader(archive, lambda path: wmt14.read([path])),
        'enwik8.zip': Reader(zipped, lambda path: enwik8.unpack(path, path.parent / 'out', 100)),
        'enwik8.gz': Reader(
            write(gzip.compress(b'text ' * 20)),
            lambda path: enwik8.unpack(path, path.parent / 'out', 100),
        ),
        'all.csv': Reader(
            write(b'id,synsetId,modelId,split\n1,02691156,abc,train\n'), shapenet.read_splits
        ),
    }
    for suffix in ('png', 'jpg', 'bmp', 'tif', 'webp', 'ppm'):
        found[f'image.{suffix}'] = Reader(image, read_rgb)
    for name in (
        'a.npy',
        'a.xyz',
        'a.ply',
        'binary.ply',
        'ascii.pcd',
        'binary.pcd',
        'binary_compressed.pcd',
    ):
        found[name] = Reader(points, read_points)
    for suffix in ('wav', 'flac', 'ogg'):
        found[f'sound.{suffix}'] = Reader(sound, listen)
    return found


NAMES = list(readers())


def damaged(data: bytes) -> Iterator[tuple[str, bytes]]:
    random = np.random.default_rng(len(data))
    lengths = {0, 1, 2, 3, len(data) // 2, len(data) - 1, len(data) - 8}
    lengths |= {2**power + offset for power in range(2, 20) for offset in (-1, 0, 1)}
    for length in sorted(length for length in lengths if 0 <= length < len(data)):
        yield f'{length} bytes', data[:length]
    places = [*range(min(32, len(data))), *random.integers(len(data), size=20).tolist()]
    for place in places:
        bit = int(random.integers(8))
        changed = bytearray(data)
        changed[place] ^= 1 << bit
        yield f'bit {bit} of byte {place}', bytes(changed)
    for place in range(0, min(96, len(data) - 8), 4):
        for value in (b'\xff\xff\xff\xff', b'\xff\xff\xff\x7f', b'\0\0\0\0', b'\0\0\0\x80'):
            yield f'{value.hex()} at {place}', data[:place] + value + data[place + 4 :]
    for match in list(re.finditer(rb'\d+', data[:2000]))[:12]:
        for value in (b'1000000000000', b'-1', b'9' * 23, b'9' * 5000, b'nan', b'1e999'):
            yield (
                f'number {value.decode()[:30]} at {match.start()}',
                data[: match.start()] + value + data[match.end() :],
            )
    yield 'twice', data + data
    yield from KINDS.items()


KINDS = {
    'zeros': bytes(5000),
    'ones': 5000 * b'\xff',
    'noise': rng.bytes(5000),
    'text': b'This is a text.\n' * 300,
    'one line': b'(' * 200_000,
    'brackets': b'[' * 200_000,
    'tags': b'<a>' * 60_000,
    'entities': b'<!DOCTYPE a [<!ENTITY b "bbbbbbbbbb">'
    + b''.join(
        b'<!ENTITY %c "%s">' % (99 + i, 10 * (b'&' + bytes([98 + i]) + b';')) for i in range(9)
    )
    + b']><a>&k;</a>',
    'gzip': gzip.compress(bytes(10**7)),
    'PostScript': b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(ran) (w) file\n',
    'a pickle': pickle.dumps(os.getpid),
    'a page': b'<!DOCTYPE html><html><body>Not found</body></html>',
}
PLACES = {
    'folder': Path.mkdir,
    'pipe': os.mkfifo,
    'no file': lambda path: None,
    'link to itself': lambda path: path.symlink_to(path),
    'device': lambda path: path.symlink_to('/dev/zero'),
}


def refuse_all(reader: Reader, path: Path, report: Path) -> None:
    warnings.simplefilter('ignore')
    os.dup2(os.open(report.with_suffix('.log'), os.O_CREAT | os.O_WRONLY, 0o600), 2)
    used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data = path.read_bytes()
    wrong = []

    def attempt(case: str) -> None:
        report.write_text(json.dumps([*wrong, f'{case}: the process ended']))
        signal.setitimer(signal.ITIMER_REAL, SECONDS)  # which ends the process
        try:
            reader.read(path)
        except REFUSED as error:
            message = str(error)
            named = path.name in message or 'list.txt' in message  # the list of the boxes
            if not named or '\n' in message or len(message) > 1000:
                wrong.append(f'{case}: {type(error).__name__} {message[:300]}')
        except BaseException:
            wrong.append(f'{case}: {traceback.format_exc()[-700:]}')

    for case, content in damaged(data):
        path.write_bytes(content)
        attempt(case)
    for case, place in PLACES.items():
        path.unlink()
        place(path)
        attempt(case)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.touch()
    report.write_text(json.dumps(wrong))


@pytest.mark.parametrize('name', NAMES)
def test_a_damaged_file_is_refused_with_its_name(name, tmp_path):
    reader = readers()[name]
    path = tmp_path / 'data' / name
    path.parent.mkdir(parents=True)
    reader.make(path)
    if name != 'config.yml':
        reader.read(path)  # imports what it needs
    child = multiprocessing.get_context('fork').Process(
        target=refuse_all, args=(reader, path, tmp_path / 'report')
    )
    child.start()
    child.join()
    wrong = json.loads((tmp_path / 'report').read_text())
    assert not wrong, '\n'.join([f'{len(wrong)} cases, status {child.exitcode}:', *wrong[:8]])
    assert child.exitcode == 0
