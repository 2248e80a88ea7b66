"""Commands and Python blocks of the documentation run unchanged."""

import argparse
import importlib.util
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import MODELS, DefaultScope
from PIL import Image

from aft_mm.models import AFTViT

from .documents import PAGES, ROOT, blocks, commands
from .helpers import each
from .parallel_data import MISSING, REASON, write_pairs
from .test_deprecation import SCRIPTS

# The tests of blocks that are not run here: page in docs, indices, file and function after test_.
HELD = [
    ('configs', (2,), 'guides', 'the_own_config_of_the_docs_trains'),
    ('configs', (3,), 'guides', 'the_config_for_own_images_trains'),
    ('other_data', (0, 1), 'guides', 'several_labels_per_image_are_learned'),
    ('other_data', (2,), 'guides', 'a_rare_class_is_found'),
    ('other_data', (3,), 'guides', 'windows_of_sensors_are_learned'),
    ('other_data', (4,), 'guides', 'a_number_per_image_is_learned'),
    ('tasks/dense_prediction', (0,), 'configs', 'example_of_the_guide_builds'),
    ('tasks/dense_prediction', (1, 2), 'own_data', 'the_configs_of_the_guide_train'),
    ('tasks/image_ar', (1, 2), 'guides', 'guide_for_own_images'),
    ('tasks/language_modeling', (1,), 'guides', 'guide_for_another_text'),
    ('tasks/machine_translation', (1,), 'guides', 'guide_for_own_languages'),
    ('tasks/point_cloud', (1,), 'guides', 'guide_for_decoding_points'),
    ('tasks/point_cloud', (2,), 'guides', 'guide_for_own_shapes'),
    ('tasks/speech_recognition', (1,), 'guides', 'guide_for_own_speech'),
    ('tasks/super_resolution', (1,), 'guides', 'guide_for_photographs'),
    ('tutorials/own_mixer', (0, 2, 3), 'site', 'a_mixer_outside_the_package_trains_and_generates'),
    (
        'tutorials/own_mixer',
        (1,),
        'mixers_of_others',
        'mixers_of_other_packages_are_listed_built_and_tested',
    ),
    ('tutorials/plain_pytorch', (4, 5), 'transformers', 'the_documented_example_runs'),
]
NOT_HERE = {(f'docs/{page}.md', index) for page, indices, *_ in HELD for index in indices}
# Programs outside the repository.
OTHERS = (
    'source xz gzip sacrebleu head export pip tensorboard find sbatch compute-sanitizer uv pre- '
    'commit mim jupyter cd git docker curl echo md5sum sha256sum mkdir mv tar unzip cat'
).split()
# What a page says that it writes for two words.
BOTH = ['CONFIG', 'CHECKPOINT']
SHORT = {'docs/analysis.md': dict(CONV=BOTH, FULL=BOTH, DEIT=BOTH, DIGITS=BOTH)}


class UnderstoodError(Exception):
    """Raised when a tool has parsed its arguments."""


@pytest.fixture
def parse(monkeypatch):
    for name in ('parse_args', 'parse_intermixed_args'):
        original = getattr(argparse.ArgumentParser, name)

        def understand(self, args=None, namespace=None, original=original):
            original(self, args, namespace)
            raise UnderstoodError

        monkeypatch.setattr(argparse.ArgumentParser, name, understand)

    def call(program, words):
        monkeypatch.setattr(sys, 'argv', [str(program), *words])
        with pytest.raises(UnderstoodError):
            if isinstance(program, Path):
                monkeypatch.syspath_prepend(str(program.parent))
                runpy.run_path(str(program), run_name='__main__')
            else:
                runpy.run_module(program, run_name='__main__')

    return call


def check(command, parse):
    program, *words = command.words
    short = SHORT.get(command.page, {})
    words = [part for word in words for part in short.get(word, [word])]
    for word in words:
        for config in re.findall(r'configs/[a-z][\w/.-]+\.py', word):
            own = config.startswith('configs/own_data/') and '-' not in Path(config).name
            any_of_them = Path(config).stem.isupper()
            if not (own or any_of_them):
                assert (ROOT / config).is_file(), f'{config} does not exist'
    if program in ('python', '.venv/bin/python') and words[0] == '-m':
        assert importlib.util.find_spec(words[1]), f'{words[1]} cannot be imported'
        if words[1] == 'aft_mm.ops':
            parse(words[1], words[2:])
    elif program in ('python', '.venv/bin/python') and words[0] != '-c':
        parse(ROOT / words[0], words[1:])
    elif program == 'python':
        compile(words[1], '-c', 'exec')
    elif program == 'aft_mm':
        parse(program, words)
    elif program == 'torchrun':
        script = next(word for word in words if word.endswith('.py'))
        parse(ROOT / script, words[words.index(script) + 1 :])
    elif program == 'bash':
        script, *words = words
        assert (ROOT / script).is_file(), f'{script} does not exist'
        if script in ('tools/dist_train.sh', 'tools/slurm_train.sh'):
            config, *rest = words[:1] + words[2:] if 'dist' in script else words[2:]
            parse(ROOT / 'tools/train.py', [config, *rest])
    elif program == 'make':
        targets = re.findall(r'^([\w-]+):', (ROOT / 'Makefile').read_text(), re.M)
        assert [word for word in words if '=' not in word][0] in targets
    elif program == 'cp':
        assert (ROOT / words[0]).is_file()
    else:
        assert program in OTHERS or program == 'pytest', f'what is {program}?'


@each('page', PAGES)
def test_commands_use_existing_files_and_options(page, parse, capsys):
    for command in commands(page):
        try:
            check(command, parse)
        except (SystemExit, pytest.fail.Exception, OSError, ImportError) as error:
            pytest.fail(f'{page}: {command.text}\n{error}\n{capsys.readouterr().err}')


@pytest.mark.parametrize('page', ['docs/analysis.md', 'docs/export.md', 'docs/model_converters.md'])
def test_what_a_command_does_is_not_run_from_tools(page):
    scripts = {path.relative_to(ROOT).as_posix() for path in SCRIPTS}
    assert len(scripts) > 20
    assert not [command.text for command in commands(page) if scripts & {*command.words}]


def test_commands_are_found():
    found = [command.words for page in PAGES for command in commands(page)]
    assert len(found) > 150
    config = 'aft-local-32-mini_1xb16-2e_mnist'
    assert ['aft_mm', 'train', config, '--work-dir', 'work_dirs/mnist'] in found


def test_every_python_block_is_tested():
    there = {(page, index) for page in PAGES for index, _ in enumerate(blocks(page, 'python'))}
    assert NOT_HERE <= there
    for page, index in there - NOT_HERE:
        config = blocks(page, 'python')[index].startswith('_base_')
        assert config or page in SETTINGS, f'{page} has Python that no test runs'


def pack(folder, config, edit=lambda config: None):
    path = ROOT / f'tests/configs/{config}.py'
    config = Config.fromfile(path, import_custom_modules=False)
    config.pop('custom_imports')
    edit(config)
    config.dump(folder / 'config.py')
    with DefaultScope.overwrite_default_scope('aft_mm'):
        model = MODELS.build(config.model)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.save(dict(state_dict=model.state_dict(), meta={}), folder / 'checkpoint.pth')


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def text(folder, request):
    pack(folder, 'tiny_text', lambda config: config.model.decoder.update(grid=(256,)))


def pixels(folder, request):
    pack(folder, 'tiny_pixels')
    return dict(images=noise(2, 8, 8, 1))


def clouds(folder, request):
    pack(folder, 'tiny_clouds')


def super_resolution(folder, request):
    pack(folder, 'tiny_super_resolution')
    return dict(image=noise(4, 4, 3), portrait=noise(218, 178, 3), photo=noise(6, 6, 3))


def classifier(folder, request):
    config, checkpoint = request.getfixturevalue('tiny_classifier')
    shutil.copy(config, 'config.py')
    shutil.copy(checkpoint, 'epoch_300.pth')
    Path('photos').mkdir()
    for name in ('a.jpg', 'b.png', 'photos/c.jpg'):
        Image.fromarray(noise(30, 40, 3)).save(name)
    return dict(array=noise(20, 20, 3))


def translation(folder, request):
    if MISSING:
        pytest.skip(REASON)
    write_pairs(folder)
    pack(folder, 'tiny_translation')


def speech(folder, request):
    soundfile = pytest.importorskip('soundfile', reason='soundfile writes the sound of this test')
    pack(folder, 'tiny_speech')
    soundfile.write('a.wav', noise(8000) / 500, 8000)


def export(folder, request):
    mixer = dict(type='aft_mm.AFTConv', num_heads=2, kernel_size=3)
    model = AFTViT(dict(embed_dims=8, num_layers=1), 32, token_mixer=mixer)
    return dict(model=model.eval(), example=torch.randn(1, 3, 32, 32))


# Files and names that a page assumes to exist.
SETTINGS = {
    'docs/export.md': export,
    'docs/tasks/image_ar.md': pixels,
    'docs/tasks/image_classification.md': classifier,
    'docs/tasks/language_modeling.md': text,
    'docs/tasks/machine_translation.md': translation,
    'docs/tasks/point_cloud.md': clouds,
    'docs/tasks/speech_recognition.md': speech,
    'docs/tasks/super_resolution.md': super_resolution,
}
PLAIN = (
    'README.md docs/configs.md docs/get_started.md docs/model_converters.md docs/ops.md '
    'docs/is_your_aft_right.md docs/minis.md docs/tutorials/plain_pytorch.md'
)
SETTINGS |= dict.fromkeys(PLAIN.split(), lambda folder, request: None)


@each('page, indices, file, name', HELD)
def test_blocks_that_are_not_run_here_have_a_test(page, indices, file, name):
    assert max(indices) < len(blocks(f'docs/{page}.md', 'python'))
    texts = [path.read_text() for path in ROOT.glob(f'tests/**/test_{file}.py')]
    assert sum(f'\ndef test_{name}(' in text for text in texts) == 1


@pytest.mark.parametrize('page', SETTINGS)
def test_python_blocks_run_unchanged(page, request, here):
    given = SETTINGS[page](here, request) or {}
    names = {}
    for index, block in enumerate(blocks(page, 'python')):
        if (page, index) not in NOT_HERE:
            names.update(given)
            exec(compile(block, f'{page}, block {index}', 'exec'), names)


@pytest.mark.parametrize(
    'page',
    [page for page in PAGES if any(block.startswith('_base_') for block in blocks(page, 'python'))],
)
def test_configs_that_are_not_trained_build(page, tmp_path):
    for index, block in enumerate(blocks(page, 'python')):
        if not block.startswith('_base_') or (page, index) in NOT_HERE:
            continue
        (tmp_path / 'mine.py').write_text(block.replace("'../_base_", f"'{ROOT}/configs/_base_"))
        config = Config.fromfile(tmp_path / 'mine.py')
        with torch.device('meta'), DefaultScope.overwrite_default_scope(config.default_scope):
            MODELS.build(config.model)
            for split in ('train', 'val', 'test'):
                Compose(config[f'{split}_dataloader'].dataset.pipeline)
