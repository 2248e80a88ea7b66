"""A translation model: training, two processes, testing, Translator and the tool."""

import io
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import RUNNERS

from aft_mm.apis import TextGenerator, Translator
from aft_mm.checkpoint import averaged
from aft_mm.engine import CheckpointCompatibilityHook, derived_seed
from aft_mm.errors import UserError
from aft_mm.evaluation import BLEU

from .errors import refuses, refuses_input, stops
from .helpers import ROOT, command, losses
from .parallel_data import MISSING, REASON

pytestmark = pytest.mark.skipif(bool(MISSING), reason=REASON)
CONFIG = ROOT / 'tests/configs/tiny_translation.py'
FILES = 'source_file', 'target_file', 'subwords'
NUMBER = itertools.count()  # runs with the same name would share a logger


def config_of(pairs, **options):
    config = Config.fromfile(CONFIG)
    config.subwords = str(pairs / config.subwords)
    for split in ('train', 'val', 'test'):
        dataset = config[f'{split}_dataloader'].dataset
        dataset.update({name: str(pairs / dataset[name]) for name in FILES})
    config.merge_from_dict(options)
    return config


@pytest.fixture(scope='module')
def train(pairs, tmp_path_factory):
    def call(**options):
        config = config_of(pairs, **options)
        config.work_dir = str(tmp_path_factory.mktemp('run'))
        config.experiment_name = f'translation {next(NUMBER)}'
        runner = RUNNERS.build(config)
        runner.train()
        return runner

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(CONFIG.parent)
        yield call


@pytest.fixture(scope='module')
def trained(train):
    return train()


@pytest.fixture(scope='module')
def files(trained, pairs):
    config = config_of(pairs)
    config.pop('custom_imports')
    path = Path(trained.work_dir, 'config.py')
    config.dump(path)
    # After so short a training all translations are equal; random weights vary them.
    checkpoint = load(trained.work_dir)
    torch.manual_seed(0)
    for name, value in checkpoint['state_dict'].items():
        torch.nn.init.normal_(value, std=0.5 if 'embedding' in name else 1)
    torch.save(checkpoint, Path(trained.work_dir, 'random.pth'))
    return str(path), str(Path(trained.work_dir, 'random.pth'))


@pytest.fixture(scope='module')
def translator(files):
    return Translator(*files, device='cpu')


def load(folder, name='epoch_3.pth'):
    return torch.load(Path(folder) / name, weights_only=True)


def lines_of(path):
    return path.read_text(encoding='utf-8').splitlines()


def test_two_processes_have_the_loss_and_the_weights_of_one(train, pairs, run, tmp_path):
    options = {
        'model.encoder.drop_rate': 0.0,
        'model.decoder.drop_rate': 0.0,
        'train_cfg.max_epochs': 1,
    }
    one = train(**options)
    for path in pairs.iterdir():
        (tmp_path / path.name).symlink_to(path)
    words = '--launcher pytorch --work-dir . --cfg-options train_dataloader.batch_size=160'.split()
    words += [f'{name}={value}' for name, value in options.items()]
    result = run(ROOT / 'tools/train.py', CONFIG, *words, cwd=tmp_path, ranks=2)
    assert result.returncode == 0, result.stderr
    ranks = [losses(tmp_path, rank) for rank in (0, 1)]
    alone = losses(one.work_dir)
    # The processes have different sentences; the loss is the mean over all tokens.
    assert ranks[0].keys() == alone.keys() and ranks[0] != ranks[1]
    both = [np.mean([rank[i] for rank in ranks]) for i in alone]
    np.testing.assert_allclose(both, list(alone.values()), rtol=1e-5)
    weights = load(tmp_path, 'epoch_1.pth')['state_dict']
    for name, value in load(one.work_dir, 'epoch_1.pth')['state_dict'].items():
        # A bias of the keys cancels: its gradient is rounding, which Adam scales up.
        if not name.endswith('.key.bias'):
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_the_test_loop_and_translator_agree(trained, translator, pairs, monkeypatch):
    before = trained.val_loop.run()['perplexity_per_subword']
    assert 1 < before < 64
    trained.model.load_state_dict(translator.model.state_dict())
    tested = []
    monkeypatch.setattr(BLEU, 'compute_metrics', lambda _, found: tested.extend(found) or {})
    assert trained.test()['perplexity_per_subword'] > before
    texts = translator(lines_of(pairs / 'val.de'), batch_size=4)  # by the options of test_cfg
    assert tested == list(zip(texts, lines_of(pairs / 'val.en'), strict=True))
    assert len(set(texts)) > 9
    tested.clear()
    dataset = trained.test_loop.dataloader.dataset
    monkeypatch.setattr(dataset, 'lengths', dataset.lengths.copy())
    for row in (3, *range(trained.test_dataloader.batch_size, len(dataset))):  # a batch of them
        dataset.lengths[row, 0] = 1
        dataset.starts[0][row] = dataset.starts[0][4] - 1  # the end alone
        texts[row] = translator('')
    trained.test()
    assert tested == list(zip(texts, lines_of(pairs / 'val.en'), strict=True))


def test_sentences_keep_their_order_and_empty_ones_stay_empty(translator, pairs):
    texts = lines_of(pairs / 'val.de')[:5]
    given = [texts[0], '', texts[1], ' \t', *texts[2:]]
    together = translator(given, batch_size=3)
    assert together[1] == together[3] == '' and translator([]) == []
    for text, translation in zip(given, together, strict=True):
        assert translator(text) == translation
    ranked = translator.n_best(texts[:3], 2, beam_size=3)
    assert [one.text for one, _ in ranked] == translator(texts[:3], beam_size=3)
    assert all(one.score >= other.score for one, other in ranked)
    generated = translator.sample(texts, seed=0)
    assert generated == translator.sample(texts, seed=0) != translator.sample(texts, seed=1)
    assert translator.sample(texts, greedy=True) == translator(texts, beam_size=1)


def test_long_sentences_are_truncated_with_a_warning(translator, monkeypatch):
    messages = []
    monkeypatch.setattr('aft_mm.apis.translator.warn', messages.append)
    cut = translator.subwords.decode(translator.subwords.encode(['Hund ' * 60])[0][:47])
    assert translator('Hund ' * 60) == translator(cut)
    (message,) = messages
    assert message.startswith(
        'truncated a sentence of 241 subwords to 48, the size of the position'
    )


def test_characters_without_a_subword_are_logged_with_their_text(translator, monkeypatch):
    messages = []
    monkeypatch.setattr('aft_mm.apis.translator.warn', messages.append)
    monkeypatch.setattr(translator, 'first_number', 11)
    translator(['ein Hund.', 'zwei €'])
    (message,) = messages
    assert message.startswith("text 12 has characters without a subword, '€', which")


def test_bad_input_is_named(translator, files, pairs, tmp_path):
    for text in (['a', 3], None):
        refuses_input('text must be a str or a list of str', translator, text)
        refuses_input('text must be a str or a list of str', translator.n_best, text, 2)
    refuses('text 2 must be valid UTF-8', translator, ['a', '\udce4'])
    message = 'options must be among beam_size, .* got '
    refuses_input(f'{message}num_best=2', translator, ['a'], num_best=2)
    for call in (translator, lambda texts, **options: translator.n_best(texts, 2, **options)):
        refuses_input(f'{message}temperature=2', call, ['a'], temperature=2)
    refuses_input('among temperature, .* got end_token=2', translator.sample, ['a'], end_token=2)
    refuses('batch_size must be an int, 1 or larger, got 0', translator, ['a'], batch_size=0)
    refuses_input(
        r'is a config for Translator \(`aft_mm translate`\), not for TextGenerator, ',
        TextGenerator,
        *files,
    )
    words = '--vocab-size 64 --no-byte-fallback --out'.split()
    command('convert subwords')([str(pairs / 'train.de'), *words, str(tmp_path / 'other.model')])
    config = Config.fromfile(files[0])
    config.subwords = str(tmp_path / 'other.model')
    refuses_input('must be those that the model was trained with', Translator, config, files[1])


def test_a_test_with_other_subwords_is_refused(trained):
    checkpoint = load(trained.work_dir)
    CheckpointCompatibilityHook().after_load_checkpoint(trained, checkpoint)
    meta = checkpoint['meta']['dataset_meta']
    assert meta['subwords'] == trained.test_loop.subwords.fingerprint
    meta['subwords'] = 'another'
    for resume in (False, True):
        with pytest.raises(UserError, match='trained with subwords of fingerprint another, but'):
            CheckpointCompatibilityHook(resume=resume).after_load_checkpoint(trained, checkpoint)


def test_the_sample_command_refers_to_translate(tool, files):
    with pytest.raises(SystemExit, match='draws nothing without an input; use `aft_mm translate`'):
        tool('sample').main([*files, '--out', 'a.txt'])


@pytest.fixture
def translate(tool, monkeypatch):
    def call(content, *words):
        out = io.BytesIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, 'stdin', SimpleNamespace(buffer=io.BytesIO(content)))
            patch.setattr(sys, 'stdout', SimpleNamespace(buffer=out, flush=lambda: None))
            tool('translate').main([*map(str, words), '--device', 'cpu'])
        return out.getvalue().decode().split('\n')

    return call


def test_the_tool_translates_lines_in_their_order(translate, translator, files, pairs, capsys):
    texts = lines_of(pairs / 'val.de')[:4]
    before, after = [''] + texts, [''] * 15 + ['ein\u2028zwei']
    content = '\n'.join(before + after).encode() + b'\nHund\xff\r\n'
    expected = translator([*before, *after, 'Hund\ufffd'])
    # The tool reads 16 batches at a time.
    assert translate(content, *files, '--batch-size', 1) == [*expected, '']
    log = capsys.readouterr().err
    assert 'line 22 is not valid UTF-8' in log and 'lines' in log
    assert translate(b'', *files) == ['']
    ranked = translate(content, *files, '--n-best', 2, '--beam-size', 3, '--length-penalty', 0)
    found = translator.n_best(['', *texts], 2, beam_size=3, length_penalty=0)
    assert ranked[0] == '0 |||  ||| 0.0000'
    assert ranked[1:3] == [f'1 ||| {one.text} ||| {one.score:.4f}' for one in found[1]]
    generated = translate('\n'.join(texts).encode(), *files, '--sample', '--seed', 5, '--top-k', 3)
    assert generated == [*translator.sample(texts, seed=5, top_k=3), '']
    samples = translator.sample(texts[:1] * 8, batch_size=1, seed=5, temperature=5.0)
    assert len(set(samples)) > 1  # each batch has noise of its own
    late = [''] * 16 + texts[:1]
    words = '--sample', '--seed', 5, '--temperature', 5.0, '--batch-size', 1
    (*_, last, _) = translate('\n'.join(late).encode(), *files, *words)
    seed = derived_seed(5, 16)  # not 21, which is another --seed
    assert [last] == translator.sample(texts[:1], batch_size=1, seed=seed, temperature=5.0)


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--beam-size', 0], '--beam-size must be an int, 1 or larger, got 0'),
        (['--n-best', 5], '--n-best must be an int, 1 to 3, got 5'),
        *(
            ([option, 2, '--sample'], f'{option} and --sample cannot be combined')
            for option in ('--n-best', '--beam-size', '--length-penalty')
        ),
        *(
            ([option, 0], f'{option} has no effect without --sample')
            for option in ('--temperature', '--top-k', '--top-p', '--seed')
        ),
        (['--greedy'], '--greedy has no effect without --sample'),
        (['--length-penalty', -1], '--length-penalty must be a finite number, 0 to 10, got -1'),
        (['--batch-size', 0], '--batch-size must be an int, 1 or larger, got 0'),
    ],
)
def test_bad_arguments_give_a_one_line_message(translate, files, words, message):
    stops(f'^Error: {message}', translate, b'ein\n', *files, *words)


def test_the_commands_average_checkpoints(tool, translate, files, pairs, tmp_path):
    config, paths = files[0], [tmp_path / f'epoch_{n}.pth' for n in (1, 2)]
    checkpoint = load(Path(files[1]).parent, 'random.pth')
    weights = checkpoint['state_dict']
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        noisy = {name: value + 0.5 * torch.randn_like(value) for name, value in weights.items()}
        torch.save({**checkpoint, 'state_dict': noisy}, path)
    with averaged(str(paths[1]), 2) as mean:
        texts = lines_of(pairs / 'val.de')[:4]
        content = '\n'.join(texts).encode()
        expected = [*Translator(config, mean, device='cpu')(texts), '']
        assert translate(content, config, paths[1], '--average', 2) == expected
        assert translate(content, config, paths[1]) != expected
        found = []
        for words in ([mean], [paths[1], '--average', 2], [paths[1]]):
            out = tmp_path / f'{len(found)}.json'
            tool('test').main([config, *map(str, words), '--out', str(out)])
            found.append(json.loads(out.read_text()))
    assert found[0] == found[1] != found[2]
