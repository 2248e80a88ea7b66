"""Utterances from sound, Kaldi's and Sphinx's files, and messages about unusual ones."""

import itertools
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.registry import TRANSFORMS

from aft_mm.datasets import (
    FSDD,
    KaldiFeatures,
    SpeechFolder,
    SphinxFeatures,
    utterances,
)
from aft_mm.datasets.file_dataset import UnusableFile
from aft_mm.datasets.sound_files import filter_banks, read_header, read_mfc, read_sound
from aft_mm.datasets.transforms import speech

from ..errors import refuses

soundfile = pytest.importorskip('soundfile', reason='soundfile reads the sound of these tests')

RATE = 8000
UNITS = dict(symbols=' abcdefghijklmnopqrstuvwxyz')
LOAD = dict(type='aft_mm.LoadUtterance', sample_rate=RATE)
PACK = dict(type='aft_mm.PackUtterance')


def noise(seconds, seed=0, channels=None):
    shape = (round(RATE * seconds),) if channels is None else (round(RATE * seconds), channels)
    return 0.1 * np.random.default_rng(seed).standard_normal(shape)


@pytest.fixture
def folder(tmp_path):
    """Three good utterances, and one of everything that may be wrong."""
    (tmp_path / 'deep').mkdir()
    soundfile.write(tmp_path / 'deep/one.wav', noise(0.7, 1), RATE)
    soundfile.write(tmp_path / 'two.flac', noise(0.5, 2, channels=2), RATE)
    soundfile.write(tmp_path / 'rate.wav', np.repeat(noise(0.5, 3), 2), 2 * RATE)
    soundfile.write(tmp_path / 'silent.wav', np.zeros(RATE), RATE)
    soundfile.write(tmp_path / 'short.wav', noise(0.06, 4), RATE)
    soundfile.write(tmp_path / 'long.wav', noise(3.0, 5), RATE)
    soundfile.write(tmp_path / 'nobody.wav', noise(0.5, 6), RATE)
    (tmp_path / 'broken.wav').write_bytes(b'RIFF' + bytes(60))
    (tmp_path / 'text').write_bytes(
        b'one a word\n\ntwo caf\xe9\nrate Zero 9\nsilent\nshort too long a text\n'
        b'long yes\nbroken no\nmissing no\n'
    )
    return tmp_path


@pytest.fixture
def log(monkeypatch):
    lines = []
    monkeypatch.setattr(utterances, 'warn', lines.append)
    return lines


def build(folder, *steps, **kwargs):
    pipeline = [LOAD, *steps, PACK]
    return SpeechFolder(str(folder), units=UNITS, pipeline=pipeline, **kwargs)


def test_what_cannot_be_trained_on_is_left_out_and_said(folder, log):
    data = build(folder, max_frames=200)
    names = [data.get_data_info(i)['name'] for i in range(len(data))]
    assert names == ['one', 'two', 'rate', 'silent']
    said = '\n'.join(log)
    for sentence in (
        'not valid UTF-8, invalid bytes are unknown: 3',
        'line(s) are empty and skipped: 2',
        'utterance(s) have a transcript without words: silent',
        'sound file(s) have no transcript and are left out: nobody',
        'utterance(s) are longer than max_frames=200 and left out: long',
        'utterance(s) have fewer frames than their transcript needs and are left out: short',
        "'\ufffd' (1 x, first in two)",
        "'Z' (1 x, first in rate)",
        "'9' (1 x",
        'utterance(s) have another sample rate, 16000 Hz are resampled to 8000 Hz: rate',
    ):
        assert sentence in said, sentence
    assert '2 utterance(s) cannot be read and are left out' in said
    assert "broken.wav' cannot be read: it is damaged" in said
    assert "missing.wav' cannot be read: it does not exist" in said
    # What is unknown of the word becomes <unk>, 1.
    assert data.units.decode(data.get_data_info(1)['units']) == 'caf<unk>'
    assert data.units.decode(data.get_data_info(2)['units']) == '<unk>ero <unk>'


@pytest.mark.parametrize('kind', ['WAV', 'WAVEX', 'RF64', 'W64', 'AIFF', 'AU', 'SVX', 'NIST'])
def test_a_cut_sound_file_is_refused(tmp_path, kind):
    path = tmp_path / 'a'
    soundfile.write(path, noise(0.7), RATE, format=kind)
    whole = path.read_bytes()
    count = len(read_sound(str(path), RATE)[0])
    path.write_bytes(whole + bytes(6))  # such as a comment at the end
    assert len(read_sound(str(path), RATE)[0]) - count in range(7)
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(UnusableFile, match='is damaged: .* announced, .* found'):
        read_sound(str(path), RATE)


@pytest.mark.parametrize('size', [0x7FFFF000, 0xFFFFFFF0, 0xFFFFFFFF])
def test_a_stream_of_unknown_length_is_read(tmp_path, size):
    path = tmp_path / 'a.wav'
    soundfile.write(path, noise(0.7), RATE)
    whole = path.read_bytes()
    path.write_bytes(whole[:40] + size.to_bytes(4, 'little') + whole[44:])
    assert len(read_sound(str(path), RATE)[0]) == int(0.7 * RATE)


def test_other_formats_are_found(tmp_path, log):
    for suffix in ('mp3', 'aiff', 'au', 'w64'):
        soundfile.write(tmp_path / f'one {suffix}.{suffix}', noise(0.7), RATE)
    lines = [f'one {suffix}\tno\n' for suffix in ('mp3', 'aiff', 'au', 'w64')]
    (tmp_path / 'text').write_text(''.join(lines))
    assert len(build(tmp_path, test_mode=True)) == 4


def test_nothing_is_left_out_of_a_test(folder, log):
    with pytest.raises(UnusableFile, match="broken.wav' cannot be read: it is damaged"):
        build(folder, test_mode=True)
    text = (folder / 'text').read_bytes()
    (folder / 'text').write_bytes(text.replace(b'broken no\n', b''))
    with pytest.raises(UnusableFile, match="missing.wav' cannot be read: it does not exist"):
        build(folder, test_mode=True)
    (folder / 'text').write_bytes(text.replace(b'broken no\nmissing no\n', b''))
    with pytest.raises(ValueError, match="'long' has 298 frames, more than max_frames=200"):
        build(folder, test_mode=True, max_frames=200)
    with pytest.raises(ValueError, match='pipeline must have one LoadUtterance, got 0'):
        SpeechFolder(str(folder), units=UNITS, pipeline=[PACK], test_mode=True)
    (folder / 'other').mkdir()
    twin = folder / 'other/one.wav'
    soundfile.write(twin, noise(0.7, 1), RATE)
    with pytest.raises(ValueError, match="utterance 'one' must be one file, got .*deep.*other"):
        build(folder, test_mode=True)
    twin.unlink()
    data = build(folder, test_mode=True)
    assert len(data) == 6 and any('are kept, with errors: short' in line for line in log)


def test_sound_becomes_mono_at_the_rate_and_that_is_said(folder):
    data = build(folder, dict(type='aft_mm.NormalizeFeatures'), max_frames=200)
    warnings = [data[i]['data_samples'].get('warnings', {}) for i in range(4)]
    assert warnings[0] == {} and list(warnings[1]) == ['2 channels are averaged']
    assert list(warnings[2]) == ['16000 Hz are resampled to 8000 Hz']
    assert list(warnings[3]) == ['a sound file is silent']
    for i in range(4):
        features = data[i]['inputs']
        assert features.isfinite().all() and len(features) == data.lengths[i]
    assert not data[3]['inputs'].any()  # the same in every frame
    mono, _ = read_sound(str(folder / 'two.flac'), RATE)
    np.testing.assert_allclose(mono, noise(0.5, 2, channels=2).mean(1), atol=1e-4)


@pytest.mark.parametrize('rate', [8000, 11025, 16000, 22050, 37800, 44056, 44100, 96000])
@pytest.mark.parametrize('samples', [1, 199, 4411, 9000])
def test_the_header_tells_the_number_of_frames(tmp_path, rate, samples):
    path = str(tmp_path / 'a.wav')
    soundfile.write(path, noise(1)[:samples], rate)
    for target in (16000, 11025):
        sound, _ = read_sound(path, target)
        assert len(sound) == -(-min(samples, RATE) * target // rate)
        assert len(filter_banks(sound, target)) == read_header(path, target)[0]


def test_filter_banks_are_log_energies_at_the_pitch():
    time = np.arange(RATE) / RATE
    found = [
        filter_banks((0.1 * np.sin(2 * np.pi * pitch * time)).astype('f4'), RATE)
        for pitch in (200, 500, 1200, 3000)
    ]
    assert [f.shape for f in found] == [(98, 40)] * 4
    mel = [1127 * np.log(1 + f / 700) for f in (20, RATE / 2)]
    for features, pitch in zip(found, (200, 500, 1200, 3000), strict=True):
        position = (1127 * np.log(1 + pitch / 700) - mel[0]) / (mel[1] - mel[0]) * 41 - 1
        assert abs(features.mean(0).argmax() - position) <= 1
    louder = filter_banks((0.2 * np.sin(2 * np.pi * 500 * time)).astype('f4'), RATE)
    np.testing.assert_allclose((louder - found[1])[:, 8:14], np.log(4), atol=1e-3)


def test_kept_features_are_read_again_as_long_as_the_file_is_the_same(folder, monkeypatch):
    step = dict(LOAD, cache_dir=str(folder / 'kept'))
    load = TRANSFORMS.build(step)
    path = str(folder / 'two.flac')
    first = load.transform(dict(path=path))

    def refuse(*args):
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(speech, 'filter_banks', refuse)
        again = load.transform(dict(path=path))
        assert (again['features'] == first['features']).all()
        assert again['warnings'] == first['warnings'] != {}
    (kept,) = (folder / 'kept').rglob('*.npz')
    for damaged in (b'', kept.read_bytes()[:-40], b'text'):
        kept.write_bytes(damaged)
        again = load.transform(dict(path=path))
        assert (again['features'] == first['features']).all()
        assert len(kept.read_bytes()) > len(damaged)
    whole = kept.read_bytes()
    tail = len(whole) - 400  # where the directory of the archive is
    for place in (*range(0, 200, 7), *range(200, tail, 199), *range(tail, len(whole), 7)):
        damaged = bytearray(whole)
        damaged[place] ^= 255
        kept.write_bytes(damaged)
        assert isinstance(load.transform(dict(path=path))['warnings'], dict)
    slower = TRANSFORMS.build(dict(step, sample_rate=RATE // 2)).transform(dict(path=path))
    assert not np.allclose(slower['features'], first['features'], atol=1e-3)
    fewer = TRANSFORMS.build(dict(step, num_mel_bins=20)).transform(dict(path=path))
    assert fewer['features'].shape == (len(first['features']), 20)
    nowhere = TRANSFORMS.build(dict(LOAD, cache_dir=path))  # a file
    with pytest.raises(ValueError, match="cache_dir '.*two.flac' cannot be written .Not a dir"):
        nowhere.transform(dict(path=path))
    soundfile.write(path, noise(0.5, 7), RATE)
    other = load.transform(dict(path=path))
    assert not np.allclose(other['features'], first['features']) and other['warnings'] == {}


def test_features_are_normalised_per_speaker_or_utterance(tmp_path):
    text = ''
    for index in range(6):
        name = f'{index}-{"ab"[index % 2]}-x'
        soundfile.write(tmp_path / f'{name}.wav', noise(0.4 + index / 9, index) * 2**index, RATE)
        text += f'{name} yes\n'
    (tmp_path / 'text').write_text(text)
    by_speaker, by_utterance = (
        build(tmp_path, dict(type='aft_mm.NormalizeFeatures', per=per), speaker='-(.)-')
        for per in ('speaker', 'utterance')
    )
    samples = [by_speaker[i] for i in range(6)]
    for speaker in 'ab':
        own = [one for one in samples if f'-{speaker}-' in one['data_samples'].name]
        rows = torch.cat([one['inputs'] for one in own])
        torch.testing.assert_close(rows.mean(0), torch.zeros(40), rtol=0, atol=1e-5)
        torch.testing.assert_close(rows.std(0, correction=0), torch.ones(40), rtol=1e-4, atol=0)
    assert by_speaker[0]['inputs'].mean() < -0.5
    assert by_utterance[0]['inputs'].mean().abs() < 1e-5
    jointly = build(tmp_path, dict(type='aft_mm.NormalizeFeatures', joint_bins=True))
    features = jointly[0]['inputs']
    assert features.mean().abs() < 1e-5 and (features.std(correction=0) - 1).abs() < 1e-5
    assert features.mean(0).abs().max() > 0.1
    message = "per must be 'utterance' for joint_bins=True, got 'speaker'"
    refuses(message, speech.NormalizeFeatures, 'speaker', joint_bins=True)
    with pytest.raises(ValueError, match='speaker must be known of every utterance'):
        build(tmp_path, dict(type='aft_mm.NormalizeFeatures', per='speaker'))
    for wrong, message in (('(', 'expression'), ('.*', 'expression with a group'), (5, 'expre')):
        with pytest.raises(ValueError, match=f'speaker must be a regular {message}'):
            build(tmp_path, speaker=wrong)


def test_frames_are_stacked_and_masked():
    features = np.arange(1, 22, dtype=np.float32).reshape(7, 3)
    stacked = speech.StackFrames(3).transform(dict(features=features))['features']
    assert stacked.shape == (3, 9) and (stacked[:2] == features[:6].reshape(2, 9)).all()
    assert (stacked[2] == np.tile(features[6], 3)).all()

    torch.manual_seed(0)
    ones = np.ones((50, 20), np.float32)
    step = speech.SpecAugment(num_bands=1, band=5, num_spans=1, span=30, most=0.2)
    for _ in range(20):
        kept = step.transform(dict(features=ones))['features'] == 1
        rows, columns = kept.any(1), kept.any(0)
        assert (kept == rows[:, None] * columns).all()  # whole bands and spans
        assert (~rows).sum() <= 10 and (~columns).sum() < 5
    assert (ones == 1).all()
    pair = speech.SpecAugment(num_bands=2, band=5, num_spans=0)
    hidden = [pair.transform(dict(features=ones))['features'][0] == 0 for _ in range(99)]
    # Two separate bands, each of at most four bins.
    assert max(np.diff(row.astype(int), prepend=0).clip(0).sum() for row in hidden) == 2
    assert 4 < max(row.sum() for row in hidden) <= 8
    none = speech.SpecAugment(0, 5, 0, 30).transform(dict(features=ones))['features']
    assert (none == 1).all() and not kept.all()


@pytest.mark.parametrize(
    ('shape', 'options'),
    [
        ((50, 13), dict(band=27, num_spans=0)),
        ((50, 4), dict(band=8, num_spans=0)),
        ((50, 3), dict(num_bands=5, band=9, num_spans=0)),
        ((7, 40), dict(num_bands=0, span=100, most=1.0)),
        ((20, 40), dict(num_bands=0, num_spans=10, span=40, most=0.9)),
    ],
)
def test_masks_wider_than_an_utterance_leave_some_of_it(shape, options):
    torch.manual_seed(0)
    ones = np.ones(shape, np.float32)
    step = speech.SpecAugment(**options)
    kept = [step.transform(dict(features=ones))['features'] for _ in range(300)]
    assert min(one.sum() for one in kept) > 0


def test_archives_of_kaldi(tmp_path, monkeypatch):
    kaldi = pytest.importorskip('kaldi_native_io', reason='it writes and reads the archives')
    rng = np.random.default_rng(0)
    matrices = {
        f'{s}-{i}': rng.standard_normal((9 + i, 40)).astype('f4') for i, s in enumerate('aab')
    }
    monkeypatch.chdir(tmp_path)
    with kaldi.FloatMatrixWriter('ark,scp:raw.ark,feats.scp') as raw:
        with kaldi.CompressedMatrixWriter('ark,scp:small.ark,small.scp') as small:
            for name, matrix in matrices.items():
                raw.write(name, matrix)
                small.write(name, matrix, kaldi.CompressionMethod.kSpeechFeature)
    Path('text').write_text(''.join(f'{name} yes\n' for name in matrices))
    Path('utt2spk').write_text(''.join(f'{name} {name[0]}\n' for name in matrices))
    pipeline = [LOAD, dict(type='aft_mm.NormalizeFeatures', per='speaker'), PACK]
    data = KaldiFeatures(str(tmp_path), units=UNITS, pipeline=pipeline)
    assert data.lengths.tolist() == [9, 10, 11]
    both = np.concatenate([matrices['a-0'], matrices['a-1']])
    expected = (matrices['a-1'] - both.mean(0)) / both.std(0)
    np.testing.assert_allclose(data[1]['inputs'], expected, rtol=1e-4, atol=1e-5)

    Path('feats.scp').write_bytes(Path('small.scp').read_bytes())
    data = KaldiFeatures(str(tmp_path), units=UNITS, pipeline=[LOAD, PACK])
    assert data.lengths.tolist() == [9, 10, 11]
    np.testing.assert_allclose(data[2]['inputs'], matrices['b-2'], atol=0.05)

    # Nothing that would run what it names, or unpickle.
    Path('evil.ark').write_bytes(b'PKL' + b'cos\nsystem\n(Vtouch ran\ntR.')
    most = b'\4' + struct.pack('<i', 2**31 - 1)
    Path('vast.ark').write_bytes(b'\0BFM ' + 2 * most + bytes(400))
    Path('cut.ark').write_bytes(Path('raw.ark').read_bytes()[:90])
    for place in ('touch ran |', 'evil.ark:0', 'raw.ark:3', 'no.ark:7', 'vast.ark:0', 'cut.ark:4'):
        Path('feats.scp').write_text(f'a-0 {place}\n')
        with pytest.raises(UnusableFile, match='Kaldi archive'):
            KaldiFeatures(str(tmp_path), units=UNITS, pipeline=[LOAD, PACK], test_mode=True)
        assert not Path('ran').exists()


def test_cepstra_of_sphinx(tmp_path, pack):
    features = np.random.default_rng(0).standard_normal((7, 13)).astype('f4')
    for order in '><':
        path = tmp_path / 'a.mfc'
        path.write_bytes(struct.pack(f'{order}i', 91) + features.astype(f'{order}f4').tobytes())
        assert (read_mfc(str(path)) == features).all()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UnusableFile, match='do not match its first number'):
        read_mfc(str(path))

    (tmp_path / 'ids').write_text('a/u1\nb/u1\n')
    (tmp_path / 'texts').write_text('NO (u1)\n')
    with pytest.raises(ValueError, match="of different names, got 'a/u1' and 'b/u1'"):
        SphinxFeatures(str(tmp_path), 'ids', 'texts', units=UNITS, pipeline=[LOAD, PACK])

    root = str(pack('an4_mfcc'))
    symbols = 'AA AE AH AO AW AY B CH D EH ER EY F G HH IH IY JH K L M N OW P R S T TH UW V W Y Z'
    train, test = (
        SphinxFeatures(
            root,
            f'etc/an4_{split}.fileids',
            f'etc/an4_{split}.transcription',
            units=dict(symbols=symbols.split(), lexicon=f'{root}/etc/an4.dic'),
            speaker='-(.+)-',
            test_mode=True,
            pipeline=[LOAD, dict(type='aft_mm.StackFrames', num_frames=3), PACK],
        )
        for split in ('train', 'test')
    )
    assert (len(train), len(test)) == (518, 78)
    speakers = [
        {data.get_data_info(i)['speaker'] for i in range(len(data))} for data in (train, test)
    ]
    assert [len(found) for found in speakers] == [40, 6] and not speakers[0] & speakers[1]
    sample = test[0]['data_samples']
    assert (sample.text, test.units.decode(sample.units)) == ('NO', 'N OW')
    assert all(
        1 not in data.get_data_info(i)['units'] for data in (train, test) for i in range(len(data))
    )


@pytest.mark.parametrize(
    ('width', 'lengths', 'said'),
    [
        (39, range(20, 40), 'may have 39 values per frame, as the lengths of all 20 files are'),
        (26, range(20, 50), 'may have 26 values per frame'),
        (13, range(20, 60), None),
        (39, [*range(20, 39), 20, 20], None),  # few lengths, as cut recordings have
    ],
)
def test_wide_frames_of_sphinx_are_said(tmp_path, log, width, lengths, said):
    names = [f'u{index}' for index in range(len(lengths))]
    for name, length in zip(names, lengths, strict=True):
        data = struct.pack('>i', width * length) + bytes(4 * width * length)
        (tmp_path / f'{name}.mfc').write_bytes(data)
    (tmp_path / 'ids').write_text('\n'.join(names))
    (tmp_path / 'texts').write_text(''.join(f'no ({name})\n' for name in names))
    settings = dict(features='.', units=UNITS, pipeline=[LOAD, PACK])
    SphinxFeatures(str(tmp_path), 'ids', 'texts', **settings).full_init()
    assert [said in line for line in log] == [True] if said else not log


def test_recordings_of_digits_are_split_by_their_number(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(utterances, 'warn', said.append)
    for digit, speaker, number in itertools.product((3, 7), ('ann', 'bob'), (0, 4, 5, 8)):
        path = tmp_path / f'recordings/{digit}_{speaker}_{number}.wav'
        path.parent.mkdir(exist_ok=True)
        soundfile.write(path, noise(0.3, number), RATE)

    words = {'3': 'three', '7': 'seven'}

    def names(split, **options):
        data = FSDD(str(tmp_path), split, units=UNITS, pipeline=[LOAD, PACK], **options)
        infos = [data.get_data_info(i) for i in range(len(data))]
        assert all(info['text'] == words[info['name'][0]] for info in infos)
        return [info['name'] for info in infos]

    assert len(names('train')) == len(names('test')) == 8
    assert {name[-1] for name in names('train')} == set('58')
    assert names('test', speakers=['bob']) == ['3_bob_0', '3_bob_4', '7_bob_0', '7_bob_4']
    assert [line.partition('its ')[2] for line in said[1:3]] == [
        'test split has 8 of 100 recordings of ann, bob',
        'train split has 8 of 900 recordings of ann, bob',
    ]
    for wrong, message in ((['eve'], 'of ann, bob, got'), ([['ann']], 'a list of names')):
        with pytest.raises(ValueError, match=f'speakers must be {message}'):
            names('test', speakers=wrong)
    with pytest.raises(ValueError, match='recordings/DIGIT_SPEAKER_NUMBER.wav of the test split'):
        FSDD(str(tmp_path / 'recordings'), 'test', units=UNITS, pipeline=[LOAD, PACK])


def test_digits(pack, monkeypatch):
    root, settings = str(pack('fsdd')), dict(units=UNITS, pipeline=[LOAD, PACK])
    train = FSDD(root, 'train', **settings)
    monkeypatch.setattr(utterances, 'warn', pytest.fail)  # the test part is complete
    test = FSDD(root, 'test', **settings)
    assert (len(train), len(test)) == (200, 250)
    infos = [test.get_data_info(i) for i in range(250)]
    assert {info['text'] for info in infos} == set(
        'zero one two three four five six seven eight nine'.split()
    )
    assert all(int(info['name'][-1]) < 5 for info in infos)
    assert test[249]['inputs'].shape == (test.lengths[249], 40)

    def said_by(speakers):
        data = FSDD(root, 'test', speakers=speakers, **settings)
        return [data.get_data_info(i)['name'].split('_')[1] for i in range(len(data))]

    names = sorted({info['name'].split('_')[1] for info in infos})
    assert len(names) == 5
    assert {name: said_by(names).count(name) for name in names} == dict.fromkeys(names, 50)
    assert said_by(names[1:2]) == names[1:2] * 50
    with pytest.raises(ValueError, match=f'speakers must be of {names[0]}, .*, got'):
        said_by([names[0], 'nobody'])
    with pytest.raises(ValueError, match='speakers must be a list of names'):
        said_by(names[0])


def test_a_folder_in_the_format_of_kaldi_text(pack):
    units = dict(UNITS, case='lower')
    data = SpeechFolder(str(pack('yesno')), units=units, pipeline=[LOAD, PACK])
    assert len(data) == 16 and data[0]['data_samples'].text == 'NO NO YES NO NO NO YES NO'
    assert data.units.decode(data[0]['data_samples'].units) == 'no no yes no no no yes no'
