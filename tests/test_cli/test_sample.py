"""`aft_mm sample`: files and rejected arguments."""

import shlex

import numpy as np
import pytest
import trimesh

from aft_mm.apis import ImageGenerator, PointCloudGenerator, TextGenerator
from aft_mm.datasets import Digits
from aft_mm.engine import derived_seed
from aft_mm.models.decoding import step_graph
from aft_mm.visualization import draw_completions, draw_point_clouds, draw_samples

from ..errors import stops
from ..helpers import picture


@pytest.fixture
def sample(tool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: tool('sample').main([*map(str, words), '--device', 'cpu'])


class TestImages:
    @pytest.mark.parametrize(
        ('words', 'options'),
        [
            (
                ['--seed', 3, '--temperature', 0.5, '--top-k', 9, '--top-p', 0.7],
                dict(seed=3, temperature=0.5, top_k=9, top_p=0.7),
            ),
            (['--greedy'], dict(greedy=True)),
        ],
    )
    def test_samples_equal_those_of_the_generator(self, sample, untrained, words, options):
        sample(*untrained['tiny_pixels'], '--out', 'new/a.png', '--num', 3, *words)
        expected = ImageGenerator(*untrained['tiny_pixels'], device='cpu').sample(3, **options)
        np.testing.assert_array_equal(picture('new/a.png'), draw_samples(expected))

    def test_steps_are_compiled_on_request(self, sample, untrained, monkeypatch):
        advances = []

        def advance(*tensors):
            advances.append(1)
            step_graph._advance_in_place(*tensors)

        monkeypatch.setattr(step_graph, '_compiled_advance', lambda: advance)
        sample(*untrained['tiny_pixels'], '--out', 'a.png', '--num', 2)
        assert not advances
        sample(*untrained['tiny_pixels'], '--out', 'b.png', '--num', 2, '--compile')
        assert advances
        np.testing.assert_array_equal(picture('a.png'), picture('b.png'))

    def test_sixteen_images_by_default(self, sample, untrained, capsys):
        sample(*untrained['tiny_pixels'], '--out', 'a.png')
        assert picture('a.png').shape == (4 * 98 + 2, 4 * 98 + 2, 3)  # 8 pixels of 12
        assert capsys.readouterr().out.endswith('written to a.png\n')

    def test_completions_of_the_test_set_or_another_one(self, sample, untrained):
        train = ['--cfg-options', 'test_dataloader.dataset.split=train']
        generator = ImageGenerator(*untrained['tiny_pixels'], device='cpu')
        for split, words, keep, rows in (('test', [], 0.5, 4), ('train', [0.25, *train], 0.25, 2)):
            sample(*untrained['tiny_pixels'], '--out', 'a.png', '--num', 3, '--complete', *words)
            images = np.stack([digit['img'] for digit in Digits(split, indices=3)])
            expected = generator.complete(images, keep, seed=0)[:, None]
            completed = draw_completions(images, expected, rows)
            np.testing.assert_array_equal(picture('a.png'), completed)


class TestText:
    def test_texts_equal_those_of_the_generator(self, sample, untrained, tmp_path):
        words = '--out a.txt --num 2 --prompt Ab --num-chars 9'
        sample(*untrained['tiny_text'], *words.split())
        generator = TextGenerator(*untrained['tiny_text'], device='cpu')
        seeds = 0, derived_seed(0, 1)  # not 1, which would be the first of --seed 1
        expected = [generator('Ab', num_chars=9, seed=seed) for seed in seeds]
        written = (tmp_path / 'a.txt').read_bytes().decode()
        assert written.split('\n' + '-' * 80 + '\n') == expected and expected[0] != expected[1]

    def test_one_text_of_the_length_of_the_table_by_default(self, sample, untrained, tmp_path):
        sample(*untrained['tiny_text'], '--out', 'a.txt')
        expected = TextGenerator(*untrained['tiny_text'], device='cpu')(seed=0)
        assert (tmp_path / 'a.txt').read_bytes().decode() == expected


class TestClouds:
    @pytest.mark.parametrize('num', [1, 2])
    def test_files_hold_the_clouds_of_the_generator(self, sample, untrained, capsys, num):
        sample(*untrained['tiny_clouds'], '--out', 'new/a.ply', '--num', num, '--seed', 2)
        names = ['new/a.ply'] if num == 1 else ['new/a-1.ply', 'new/a-2.ply']
        assert capsys.readouterr().out.endswith(f'written to {", ".join(names)}\n')
        clouds = PointCloudGenerator(*untrained['tiny_clouds'], device='cpu').sample(num, seed=2)
        for name, cloud in zip(names, clouds, strict=True):
            np.testing.assert_array_equal(trimesh.load(name).vertices, cloud)

    def test_one_file_or_eight_clouds_by_default(self, sample, untrained, tmp_path):
        sample(*untrained['tiny_clouds'], '--out', 'a.ply')
        sample(*untrained['tiny_clouds'], '--out', 'a.png')
        clouds = PointCloudGenerator(*untrained['tiny_clouds'], device='cpu').sample(8, seed=0)
        np.testing.assert_array_equal(picture('a.png'), draw_point_clouds(clouds, up='y'))
        assert sorted(path.name for path in tmp_path.iterdir()) == ['a.ply', 'a.png']


@pytest.mark.parametrize(
    ('kind', 'words', 'message'),
    [
        ('clouds', 'a.txt', "--out .* must end in .ply or .png, got 'a.txt'"),
        ('pixels', 'a.txt', "--out .* must end in .png, got 'a.txt'"),
        ('text', 'a.png', "--out .* must end in .txt, got 'a.png'"),
        ('super_resolution', 'a.png', 'draws nothing without an input; use `aft_mm super-resolve`'),
        ('clouds', 'a.ply --complete', '--complete has no effect on the model'),
        ('text', 'a.txt --complete', '--complete has no effect on the model of'),
        ('clouds', 'a.ply --prompt a', '--prompt has no effect on the model'),
        ('pixels', 'a.png --prompt a', '--prompt has no effect on the model of'),
        ('pixels', 'a.png --num-chars 5', '--num-chars has no effect on the model of'),
        ('pixels', 'a.png --num 0', '--num must be an int, 1 or larger, got 0'),
        ('pixels', 'a.png --complete 1.0', '--complete.* must be the share of 1 to 7 of 8 rows'),
        ('pixels', 'a.png --temperature 0', 'temperature must be .* above 0'),
        *(
            ('text', f'a.txt --greedy {words}', f'{words[:-2]} and --greedy cannot be combined')
            for words in ('--temperature 1', '--top-k 1', '--top-p 1', '--seed 0')
        ),
        ('text', "a.txt --prompt '\udce4bc'", r"prompt must be valid UTF-8, got '\\udce4bc'$"),
        ('text', 'a.txt --prompt ""', 'prompt must be a str of at least one'),
    ],
)
def test_bad_arguments_give_a_one_line_message(sample, untrained, tmp_path, kind, words, message):
    (tmp_path / 'a.png').write_bytes(b'old')
    command = *untrained[f'tiny_{kind}'], '--out', *shlex.split(words)
    stops(rf'Error: (?!.*\.py:).*{message}', sample, *command)
    assert [path.read_bytes() for path in tmp_path.glob('a.*')] == [b'old']  # kept


@pytest.mark.parametrize(
    ('kind', 'words', 'out', 'wrong'),
    [
        ('tiny_clouds', ['--num', 2], 'a.ply', 'a-2.ply'),
        ('tiny_clouds', [], 'a.ply', 'a.ply'),
        ('tiny_clouds', [], 'a.png', 'a.png'),
        ('tiny_pixels', [], 'a.png', 'a.png'),
        ('tiny_text', ['--num', 2], 'a.txt', 'a.txt'),
        ('tiny_text', [], 'file/b/a.txt', 'file/b/a.txt'),
    ],
)
def test_an_unwritable_out_is_rejected_before_sampling(
    sample, untrained, tmp_path, monkeypatch, kind, words, out, wrong
):
    def draw(*args, **kwargs):
        raise AssertionError('the model must not be loaded')

    monkeypatch.setattr('aft_mm.apis.loading.CheckpointLoader.load_checkpoint', draw)
    (tmp_path / 'file').write_bytes(b'')
    if 'file' not in wrong:
        (tmp_path / wrong).mkdir()
    with pytest.raises(SystemExit, match=f"^Error: --out '{wrong}' cannot be written: (Is|Not) a"):
        sample(*untrained[kind], '--out', out, *words)
    assert len(list(tmp_path.iterdir())) <= 2


@pytest.mark.parametrize(
    ('kind', 'options', 'out', 'source'),
    [
        ('text', [], 'text.txt', 'text.txt'),
        ('text', [], 'link.txt', 'text.txt'),
        ('pixels', ['train_dataloader.dataset.data_root=own'], 'own/cat/1.png', 'own/cat/1.png'),
    ],
)
def test_data_of_the_config_is_kept(sample, untrained, tmp_path, kind, options, out, source):
    (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / source).write_bytes(b'mine')
    (tmp_path / 'link.txt').symlink_to('text.txt')
    words = '--cfg-options', *options
    message = f"^Error: --out must not replace data, got '{out}', .* that the command reads$"
    stops(message, sample, *untrained[f'tiny_{kind}'], '--out', out, *(words if options else ()))
    assert (tmp_path / source).read_bytes() == b'mine'
