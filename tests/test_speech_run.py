"""Speech recognition: training, one and two processes, recognition."""

import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from mmengine.config import Config
from mmengine.registry import DATA_SAMPLERS, DATASETS, MODELS, init_default_scope

from aft_mm.analysis.run_logs import read_scalars
from aft_mm.apis import SpeechRecognizer
from aft_mm.errors import UserError

from .errors import refuses, refuses_input, stops
from .helpers import drop
from .speech_data import write_sound

for library in ('soundfile', 'jiwer'):
    pytest.importorskip(library, reason=f'{library} comes with the extra speech')


@pytest.fixture(scope='module')
def trained(run, root, config, tmp_path_factory):
    folder = tmp_path_factory.mktemp('speech')
    write_sound(folder)
    done = run(root / 'tools/train.py', config('tiny_speech'), '--work-dir', '.', cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_log_has_rates_seconds_and_the_schedule(trained):
    records = read_scalars(trained)
    seconds = [record['seconds_per_epoch'] for record in records if 'seconds_per_epoch' in record]
    assert len(seconds) == 3 and all(0 < value < 60 for value in seconds)
    rates = [record for record in records if 'character_error_rate' in record]
    assert len(rates) == 3 and all('word_error_rate' in record for record in rates)
    # No improvement reaches the threshold, so every validation but the first halves the rate.
    lr = [record['lr'] for record in records if 'lr' in record]
    assert lr[0] == 1e-3 and lr[-1] == 5e-4


def loss_and_gradients(config, rank, world_size):
    config = Config.fromfile(config, import_custom_modules=False)
    init_default_scope('aft_mm')
    torch.manual_seed(0)
    model = MODELS.build(config.model).eval()
    loader = config.train_dataloader
    pipeline = [step for step in loader.dataset.pipeline if step.type != 'SpecAugment']
    dataset = DATASETS.build({**loader.dataset, 'pipeline': pipeline})
    sampler = DATA_SAMPLERS.build(dict(loader.sampler, dataset=dataset, seed=1))
    assert (sampler.rank, sampler.world_size) == (rank, world_size)
    batches = DATA_SAMPLERS.build(
        dict(loader.batch_sampler, max_length=None, sampler=sampler, batch_size=6 // world_size)
    )
    samples = [dataset[index] for index in next(iter(batches))]
    batch = {key: [sample[key] for sample in samples] for key in samples[0]}
    loss = model(**model.data_preprocessor(batch, training=True), mode='loss')['loss']
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    return loss.detach(), gradient, sum(len(s['data_samples'].units) for s in samples)


def rank_of_two(rank, config, address):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=address, rank=rank, world_size=2)
    loss, gradient, units = loss_and_gradients(config, rank, 2)
    for value in (loss, gradient):
        dist.all_reduce(value)
        value /= 2  # like DistributedDataParallel
    torch.save((loss, gradient, units), f'rank_{rank}.pt')
    dist.destroy_process_group()


def test_two_processes_have_loss_and_gradients_of_one(config, here):
    write_sound(here)
    loss, gradient, units = loss_and_gradients(config('tiny_speech'), 0, 1)
    arguments = config('tiny_speech'), f'file://{here}/meet'
    mp.start_processes(rank_of_two, arguments, 2, start_method='fork')
    found = [torch.load(f'rank_{rank}.pt') for rank in (0, 1)]
    # The ranks have different sizes, so a mean of means would differ.
    assert found[0][2] != found[1][2] and found[0][2] + found[1][2] == units
    for other, all_of_them, _ in found:
        torch.testing.assert_close(other, loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(all_of_them, gradient, rtol=1e-4, atol=1e-6)


class TestUse:
    @pytest.fixture(scope='class')
    def files(self, trained):
        folder = trained
        (folder / 'sound/broken.wav').write_bytes(b'RIFF')
        text = [line.split(' ', 1) for line in open(folder / 'sound/test.txt')]
        return [str(folder / f'sound/{name}.wav') for name, _ in text]

    @pytest.fixture(scope='class')
    def recognizer(self, trained, config):
        plain = Config.fromfile(config('tiny_speech'), import_custom_modules=False)
        plain.pop('custom_imports')
        plain.dump(trained / 'plain.py')
        return SpeechRecognizer(str(trained / 'plain.py'), trained / 'epoch_3.pth', device='cpu')

    def test_a_list_is_recognised_like_single_files(self, recognizer, files, monkeypatch):
        together = recognizer(files, beam_size=4, batch_size=3)
        for path, found in zip(files, together, strict=True):
            alone = recognizer(path, beam_size=4)
            np.testing.assert_allclose(alone.log_probs, found.log_probs, atol=1e-5)
            assert alone.text == found.text == found.alternatives[0][0]
            scores = [score for _, score in found.alternatives]
            assert scores == sorted(scores, reverse=True) and len(scores) == 4
        assert recognizer.seconds_per_frame == pytest.approx(0.02)
        monkeypatch.setattr(recognizer.units, 'decode', lambda units: 'a b ')
        assert recognizer(files[0]).text == 'a b'

    def test_samples_come_one_by_one_also_to_a_model_in_training(self, recognizer, files):
        expected = recognizer(files[:3])
        model = recognizer.model
        handle = model.encoder.register_forward_hook(drop)
        model.train()
        found = recognizer.stream((recognizer.read(path) for path in files[:3]), batch_size=2)
        assert next(found).score == expected[0].score and model.training and model.encoder.training
        assert [one.text for one in found] == [one.text for one in expected[1:]]
        model.eval()
        handle.remove()

    def test_bad_files_are_named(self, recognizer, files, tmp_path):
        import soundfile

        refuses_input("'no.wav' cannot be read: it does not exist", recognizer, 'no.wav')
        for wrong in (None, np.zeros(8000, np.float32), (np.zeros(8000), 8000), b'a.wav'):
            refuses('paths must be the path of a file or folder, got', recognizer, wrong)
        refuses_input('samples must be those of read', lambda: next(recognizer.stream(files)))
        soundfile.write(tmp_path / 'long.wav', np.ones(8000 * 2), 8000)
        with pytest.raises(UserError, match=r'must be at most 1.28 s long, .* got 1.98 s'):
            recognizer(tmp_path / 'long.wav')

    def test_transcribe_keeps_the_order_and_reports_bad_files(
        self, tool, recognizer, trained, files, capsys
    ):
        folder = trained
        words = [
            str(folder / 'plain.py'),
            str(folder / 'epoch_3.pth'),
            files[0],
            str(folder / 'sound/broken.wav'),
            *files[1:],
            '--device',
            'cpu',
        ]
        picture = folder / 'alignment.png'
        with pytest.raises(SystemExit) as end:
            tool('transcribe').main([*words, '--batch-size', '2', '--picture', str(picture)])
        out, err = capsys.readouterr()
        assert end.value.code == 1 and "broken.wav' cannot be read" in err
        lines = [line.split('\t') for line in out.splitlines()]
        expected = [[path, recognizer(path).text] for path in files]
        expected.insert(1, [words[3], ''])
        assert lines == expected and picture.stat().st_size > 5000
        assert f'written to {picture}\n' in err

        picture.unlink()
        tabbed = folder / 'a\tb.wav'
        shutil.copy(files[0], tabbed)
        with pytest.raises(SystemExit):
            tool('transcribe').main([*words[:2], words[3], str(tabbed), '--picture', str(picture)])
        out, err = capsys.readouterr()
        assert f'{picture} is not written, because the first file cannot be read' in err
        assert not picture.exists()  # it would show another file
        assert out.splitlines()[1] == f'{str(tabbed)!r}\t{recognizer(files[0]).text}'

        tool('transcribe').main([*words[:3], '--num-best', '3', '--beam-size', '4'])
        lines = [line.split('\t') for line in capsys.readouterr().out.splitlines()]
        best = recognizer(files[0], beam_size=4).alternatives[:3]
        assert lines == [[files[0], f'{score:.3f}', text] for text, score in best]

    def test_unused_arguments_are_refused(self, tool, trained, capsys):
        words = [str(trained / 'plain.py'), str(trained / 'epoch_3.pth'), 'a.wav']
        for more, message in (
            (['--num-best', '9'], '--num-best with a beam size of 3 must be an int, 1 to 3, got 9'),
            (['--transcript', 'a'], '--transcript needs --picture'),
            (['--picture', 'a.png', '--transcript', '\udce4'], '--transcript must be valid UTF-8'),
            (['--batch-size', '0'], '--batch-size must be an int, 1 or larger'),
        ):
            stops(message, tool('transcribe').main, [*words, *more])
