"""ImageGenerator and TextGenerator, and the choice of the inferencer for a config."""

import math
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image
from torch import nn

from aft_mm.apis import (
    ImageGenerator,
    PointCloudGenerator,
    SpeechRecognizer,
    SuperResolver,
    TextGenerator,
    load_model,
)
from aft_mm.apis.loading import as_list
from aft_mm.models import AFTClassifier
from aft_mm.structures import SequenceSample

from ..errors import refuses, refuses_input
from ..helpers import drop


@pytest.mark.parametrize(
    ('given', 'expected'),
    [
        ('ab', 1),
        (b'ab', 1),
        (Path('a/b'), 1),
        (dict(a=1, b=2), 1),
        (np.zeros((2, 3)), 1),
        (torch.zeros(2, 3), 1),
        (BytesIO(b'a\nb'), 1),
        (3, 1),
        (np.array(['a', 'b']), 2),
        (('a', 'b'), 2),
        (iter('ab'), 2),
    ],
)
def test_only_collections_are_several_inputs(given, expected):
    assert len(as_list(given)) == expected


# The inferencer for each config, and the errors of the others.
OWNERS = dict(
    tiny_text=(
        TextGenerator,
        'has none of subwords, units, source_shape, point_cloud, image_shape',
    ),
    tiny_pixels=(ImageGenerator, 'has image_shape'),
    tiny_super_resolution=(SuperResolver, 'has source_shape'),
    tiny_clouds=(PointCloudGenerator, 'has point_cloud'),
)


@pytest.fixture(scope='module')
def images(untrained):
    return ImageGenerator(*untrained['tiny_pixels'], device='cpu')


@pytest.fixture(scope='module')
def text(untrained):
    return TextGenerator(*untrained['tiny_text'], device='cpu')


class Wrapper(nn.Module):
    """Passes attributes on, as adapters do."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def __getattr__(self, name):
        inner = super().__getattr__('inner')
        return inner if name == 'inner' else getattr(inner, name)


class TestLoadModel:
    def test_weights_are_those_of_the_file_and_the_model_is_frozen(self, untrained):
        config, model = load_model(*untrained['tiny_text'], device='cpu')
        weights = torch.load(untrained['tiny_text'][1], weights_only=True)['state_dict']
        assert config.model.decoder.embed_dims == 16
        for name, value in model.state_dict().items():
            assert torch.equal(value, weights[name]), name
        assert not model.training and not any(p.requires_grad for p in model.parameters())

    def test_a_config_object_is_accepted(self, untrained):
        config = Config.fromfile(untrained['tiny_text'][0])
        _, model = load_model(config, untrained['tiny_text'][1], device='cpu')
        assert model.decoder.max_length == 32
        config.model.decoder.num_layers = 3
        message = 'does not fit the model .*tiny_text.py.* missing'
        refuses_input(message, load_model, config, untrained['tiny_text'][1])

    def test_a_loaded_model_is_checked(self, untrained, tiny_classifier):
        config, model = load_model(*untrained['tiny_text'], device='cpu')
        del model.dataset_meta
        assert load_model(config, model.train()) == (config, model)
        assert model.training and model.dataset_meta == {}
        for wrap in (torch.compile, Wrapper):
            assert TextGenerator(config, wrap(model)).score('abc').shape == (3,)
        message = 'checkpoint must be a path or a model of type AutoregressiveModel, .* got '
        parts = dict(embed_dims=8, num_layers=1, mlp_ratio=2), dict(type='aft_mm.AFTSimple')
        others = nn.Linear(2, 2), nn.Sequential(model), load_model(*tiny_classifier, 'cpu')[1]
        for other in (*others, AFTClassifier(*parts, img_size=4, patch_size=2)):
            name = type(other).__name__
            refuses_input(f'{message}{name}$', TextGenerator, config, other)
            if name != 'ImageClassifier':
                refuses_input(
                    f'type ImageClassifier, .* got {name}', load_model, tiny_classifier[0], other
                )
        for device in ('banana', 3.5, 'cuda:99'):
            for checkpoint in (model, untrained['tiny_text'][1], None):
                message = 'device must be one of this machine, such as cpu, got '
                refuses_input(message, load_model, config, checkpoint, device)

    def test_random_numbers_of_the_user_stay_the_same(self, untrained, monkeypatch):
        config, checkpoint = untrained['tiny_text']
        messages = []
        monkeypatch.setattr('aft_mm.apis.loading.warn', messages.append)
        weights = []
        for seed, given in ((1, None), (2, None), (3, checkpoint)):
            torch.manual_seed(seed)
            expected = torch.rand(3)
            torch.manual_seed(seed)
            weights.append(TextGenerator(config, given, 'cpu').model.state_dict())
            assert torch.equal(torch.rand(3), expected)
        assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
        assert messages == 2 * [
            'TextGenerator has a model with random weights, as checkpoint is None'
        ]

    def test_other_types_are_named(self, untrained):
        for wrong in (True, 3, b'a', ['a.pth']):
            refuses('checkpoint must be the path', load_model, untrained['tiny_text'][0], wrong)
            refuses('config must be the path', load_model, wrong, None)

    def test_missing_files_are_named(self, untrained):
        config, checkpoint = untrained['tiny_text']
        refuses_input("config 'no.py' does not exist", load_model, 'no.py', checkpoint)
        refuses_input("checkpoint 'no.pth' does not exist", load_model, config, 'no.pth')
        refuses_input("checkpoint '.*' is not a file", load_model, config, '.')


@pytest.mark.parametrize('kind', OWNERS)
def test_a_config_is_for_one_class(untrained, kind):
    owner, reason = OWNERS[kind]
    assert isinstance(owner(*untrained[kind], device='cpu').config, Config)
    other = untrained['tiny_clouds' if kind == 'tiny_text' else 'tiny_text'][1]
    for generator in {owner for owner, _ in OWNERS.values()} - {owner}:
        message = rf'{kind}.py is a config for {owner.__name__} \(`aft_mm .*`\), not for '
        message += f'{generator.__name__}, '
        message += f'because it {reason}$'
        for checkpoint in (untrained[kind][1], other):  # which does not fit
            refuses_input(message, generator, untrained[kind][0], checkpoint, device='cpu')


def test_a_config_without_units_is_not_for_speech(untrained, tiny_classifier):
    for config in (untrained['tiny_text'][0], tiny_classifier[0]):
        refuses_input(r'\.py must have units for SpeechRecognizer', SpeechRecognizer, config, None)


class TestImageGenerator:
    def test_samples(self, images, capsys):
        samples = images.sample(3, seed=0)
        assert samples.shape == (3, 8, 8, 1) and samples.dtype == np.uint8
        assert '100%' in capsys.readouterr().err
        np.testing.assert_array_equal(images.sample(3, seed=0, progress=False), samples)
        assert not capsys.readouterr().err
        assert (images.sample(3, seed=1) != samples).any()
        assert (images.sample(3, seed=0, temperature=0.5) != samples).any()

    @pytest.mark.parametrize(('keep', 'rows'), [(0.5, 4), (0.2, 2), (0.9, 7)])
    def test_completions(self, images, keep, rows):
        given = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), dtype=np.uint8)
        completed = images.complete(list(given), keep, seed=0)
        np.testing.assert_array_equal(completed[:, :rows], given[:, :rows])
        assert (completed[:, rows] != given[:, rows]).any()

    def test_completions_of_files_and_pictures(self, images, tmp_path):
        given = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
        picture = Image.fromarray(given)
        picture.save(tmp_path / 'a.png')
        forms = [tmp_path / 'a.png', picture, given, given[..., None], picture.convert('RGB')]
        expected = images.complete(given[None, ..., None], greedy=True)
        for one in forms:
            np.testing.assert_array_equal(images.complete(one, greedy=True), expected)
        together = images.complete(forms, greedy=True)
        np.testing.assert_array_equal(together, np.repeat(expected, 5, 0))

    def test_bad_input_is_named(self, images, untrained):
        for wrong in (np.zeros((2, 8, 9, 1), np.uint8), np.zeros((8, 9), np.uint8)):
            refuses_input('images must be 8 x 8 pixels .*, got 8 x 9', images.complete, wrong)
        whole = np.zeros((2, 8, 8, 1))
        refuses_input('image must be a path, .* got .* float64', images.complete, whole)
        for keep in (0, 1.0, -3, math.nan, math.inf, 0.05):
            message = f'keep .*(1 to 7 of 8 rows|finite).* got {keep}'
            refuses(message, images.complete, whole.astype(np.uint8), keep)
        none = np.zeros((0, 8, 8, 1), np.uint8)
        refuses_input('images must hold at least one image', images.complete, none)
        for num in (0, -1, 2.5):
            refuses(f'num must be an int, 1 or larger, got {num}', images.sample, num)
        for name in ('batch_size', 'source', 'end_token', 'temprature'):
            message = f'options must be among temperature, top_k, .* compiled, got {name}=3$'
            refuses_input(message, images.sample, **{name: 3})
        for options in (dict(temperature=0.0), dict(top_p=0.0), dict(top_k=0)):
            refuses(next(iter(options)), images.sample, 1, **options)
        config = Config.fromfile(untrained['tiny_pixels'][0])
        config.image_shape = (8, 8, 3)
        shape = r'H·W·C = 64, .* got \(8, 8, 3\)'
        refuses_input(shape, ImageGenerator, config, untrained['tiny_pixels'][1])


class TestTextGenerator:
    def test_a_prompt_is_continued_by_as_many_bytes(self, text):
        result = text('abc', num_chars=9, seed=0, top_k=1)
        tokens = text.model.generate(12, prompts=[torch.tensor(list(b'abc'))], greedy=True)
        assert result == bytes(tokens[0].tolist()).decode(errors='replace')
        assert result.startswith('abc')

    def test_prompts_of_different_lengths_are_continued_as_alone(self, text):
        prompts = ['a', 'a longer prompt', 'Ä']
        together = text(prompts, num_chars=7, greedy=True)
        assert together == [text(prompt, num_chars=7, greedy=True) for prompt in prompts]
        assert all(map(str.startswith, together, prompts))

    def test_scores_are_log_probabilities(self, text):
        """Probabilities of the next byte sum to one; the score of a text equals that of a test."""
        scores = text.score('Ägypt')
        assert scores.shape == (6,) and scores.dtype == np.float64
        alternatives = [text.score(f'ab{chr(last)}')[2] for last in range(128)]
        tokens = torch.tensor([[*b'ab', last] for last in range(256)])
        nats = text.model.head.nats(text.model.decoder(tokens), tokens)
        np.testing.assert_allclose(alternatives, -nats[:128, 2], rtol=1e-4)
        assert (-nats[:, 2]).exp().sum().item() == pytest.approx(1, rel=1e-4)
        (sample,) = text.model(tokens[7:8], [SequenceSample()], mode='predict')
        assert text.score('ab\x07').sum() == pytest.approx(-sample.nats, rel=1e-6)
        several = text.score(['Ägypt', 'b'])
        np.testing.assert_allclose(several[0], scores, rtol=1e-6)
        assert several[1].shape == (1,)

    def test_a_model_in_training_scores_as_in_a_test(self, untrained):
        config, model = load_model(*untrained['tiny_text'], device='cpu')
        text = TextGenerator(config, model)
        model.decoder.register_forward_hook(drop)
        expected = text.score('Ägypt')
        model.train()
        np.testing.assert_array_equal(text.score('Ägypt'), expected)
        assert model.training and model.decoder.training

    def test_the_end_ends_the_text(self, text):
        (all_of_them,) = text.model.generate(12, prompts=[[*b'abc']], greedy=True)
        end = int(all_of_them[6])
        before = all_of_them.tolist().index(end, 3)
        expected = bytes(all_of_them[:before].tolist()).decode(errors='replace')
        options = dict(num_chars=9, greedy=True, end_token=end)
        assert text('abc', **options) == expected
        assert text(['abc', 'abcd'], **options)[0] == expected
        assert text(chr(97), num_chars=4, greedy=True, end_token=97).startswith('a')
        tokens = text.model.generate(32, greedy=True)[0].tolist()
        assert text(None, greedy=True, end_token=tokens[0]) == ''

    def test_texts_that_cannot_be_scored_are_named(self, text):
        message = 'text must be a str of at least one character, or a list of such, got '
        for given in ('', b'ab', [], ['a', None]):
            refuses_input(message, text.score, given)
        message = "text must be at most 32 bytes, the model's position table, got 33"
        refuses_input(message, text.score, 'a' * 33)

    def test_without_prompt_and_without_length(self, text, monkeypatch):
        lengths = []
        generate = text.model.generate

        def count(length, **options):
            lengths.append(length)
            return generate(length, **options)

        monkeypatch.setattr(text.model, 'generate', count)
        assert isinstance(text(seed=0), str) and isinstance(text(None, num_chars=5), str)
        text('abc'), text(['abc', 'abcd'])
        assert lengths == [32, 5, 32, 32]

    def test_seed_and_options_change_the_text(self, text):
        first = text('abc', seed=0)
        assert text('abc', seed=0) == first
        for options in (dict(seed=1), dict(seed=0, temperature=0.1), dict(seed=0, top_p=0.1)):
            assert text('abc', **options) != first

    def test_invalid_bytes_are_replaced(self, text):
        with torch.no_grad():
            text.model.head.bias[0xFF] = 1e6
            try:
                assert text('ä', num_chars=3) == 'ä\ufffd\ufffd\ufffd'
            finally:
                text.model.head.bias[0xFF] = 0

    def test_bad_input_is_named(self, text):
        refuses_input('options must be among .* end_token, .* got batch_size=3', text, batch_size=3)
        for prompt in (
            '',
            [],
            ['a', ''],
            np.zeros((30, 30)),
            torch.ones(9, 9),
            b'a',
            [b'a'],
            [1, 2],
            ['a', None],
            5,
        ):
            refuses_input('prompt must be a str of at least one character', text, prompt)
        for num_chars in (0, 2.5, '7'):
            message = f'num_chars must be an int, 1 or larger, got {num_chars!r}'
            refuses(message, text, 'a', num_chars=num_chars)
        together = 'prompt and num_chars must be at most 32 bytes together, .* got'
        for arguments, numbers in [
            (('a', 32), '1 and 32'),
            ((['a', 'Ä'], 31), '2 and 31'),
            (('a' * 32, None), '32 and at least 1'),
            (('a' * 40, 1), '40 and 1'),
            ((None, 33), '0 and 33'),
        ]:
            refuses_input(f'{together} {numbers}', text, *arguments)
        assert len(text('a' * 31)) == 32
