"""The wheel: its files and metadata, and commands in an environment without the checkout."""

import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_string
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import aft_mm
from aft_mm.cli.commands.doctor import PYTHON
from aft_mm.cli.commands.quickstart import NAME as QUICKSTART

from .documents import commands
from .errors import refuses
from .helpers import load_script
from .test_guides import GUIDES, python_blocks
from .test_packaging import files_below, licenses

pytestmark = pytest.mark.slow

CARRIED = '*.py', '*.html', '*.js', '*.cpp', '*.cu', '*.h', 'py.typed'
# Runs code in forks of one process, which saves the time to import torch and OpenMMLab. The
# commands that quickstart starts are forks, too.
FORKS = """
import importlib, json, os, sys
from multiprocessing import get_context
from types import SimpleNamespace
from aft_mm.cli.commands import quickstart
from aft_mm.cli.main import main

def call(command, env):
    os.environ.update(env)
    process = start('main()', command[command.index('aft_mm'):])
    process.join()
    return process.exitcode

def start(*job):
    process = get_context('fork').Process(target=become, args=job)
    process.start()
    return process

def become(code, words, printed=None):
    if printed:
        file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1), os.dup2(file, 2)
    sys.argv = words
    exec(code, dict(__name__='__main__', main=main))

for name in ('apis', 'datasets', 'engine', 'evaluation', 'models'):
    for package in ('aft_mm', 'mmpretrain'):
        importlib.import_module(f'{package}.{name}')
import sklearn.datasets, torchvision
quickstart.subprocess = SimpleNamespace(call=call)
for line in sys.stdin:
    process = start(*json.loads(line), 'printed')
    process.join(300)
    process.kill()
    print(process.exitcode, flush=True)
"""
# Parses every command and builds the model of each config, with the wheel.
PARSE_AND_BUILD = """
import argparse, json, sys
from pathlib import Path
from unittest.mock import patch
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from aft_mm.cli.main import main
from aft_mm.config.finding import find_config, install_root
from aft_mm.config.reading import read_config

class Parsed(Exception):
    pass

def stops(original):
    def parse(self, args=None, namespace=None):
        original(self, args, namespace)
        raise Parsed
    return parse

given = json.loads(Path('guides.json').read_text())
for name in ('parse_args', 'parse_intermixed_args'):
    original = getattr(argparse.ArgumentParser, name)
    patch.object(argparse.ArgumentParser, name, stops(original)).start()
for words in given['commands']:
    try:
        main(words)
    except Parsed:
        continue
    raise SystemExit(f'not parsed: {words}')
patch.stopall()
for number, text in enumerate(given['configs']):
    before = f'config{number - 1}.py'  # a guide's detector.py is the config above
    Path(f'config{number}.py').write_text(text.replace('detector.py', before))
configs = [Config.fromfile(f'config{n}.py', import_custom_modules=False)
           for n in range(len(given['configs']))]
configs += [read_config(find_config(name)) for name in given['names']]
for config in configs:
    config.model.pop('pretrained', None)
    with torch.device('meta'), DefaultScope.overwrite_default_scope(config.default_scope):
        MODELS.build(config.model)
print(len(given['commands']), len(configs), install_root())
"""


def build_wheel(root, folder, **environment):
    words = f'-q egg_info -e {folder} build -b {folder}/build --build-lib {folder}/lib '
    words += f'bdist_wheel -d {folder} -b {folder}/bdist'
    command = [sys.executable, 'setup.py', *words.split()]
    environment = {**os.environ, **environment}
    done = subprocess.run(
        command, cwd=root, check=True, capture_output=True, text=True, env=environment
    )
    (path,) = folder.glob('*.whl')
    with zipfile.ZipFile(path) as file:
        names = file.namelist()
        (name,) = [name for name in names if name.endswith('/METADATA')]
        return path, names, message_from_string(file.read(name).decode()), done.stderr


@pytest.fixture(scope='module')
def wheel(root, tmp_path_factory):
    """A wheel with the C++ loops; those of the checkout are reused if they are up to date."""
    folder = tmp_path_factory.mktemp('wheel')
    (folder / 'lib/aft_mm/ops/native').mkdir(parents=True)
    for path in (root / 'aft_mm/ops/native').glob('*.so*'):
        shutil.copy(path, folder / 'lib/aft_mm/ops/native')
    return build_wheel(root, folder)


@pytest.fixture(scope='module')
def pure_wheel(root, tmp_path_factory):
    return build_wheel(root, tmp_path_factory.mktemp('pure'), CC='false', CXX='false')


def test_the_wheel_has_every_module_and_the_files_for_mim(wheel, root):
    names = {name for name in wheel[1] if '.dist-info/' not in name}
    package = files_below(root / 'aft_mm', *CARRIED)
    carried = files_below(root / 'configs', '*') | files_below(root / 'tools', '*')
    loops = {name for name in names if name.endswith(('.so', '.so.sha256'))}
    found = {tuple(Path(name).name.split('.')[:2]) for name in loops}
    instructions = ['any', *(['avx2', 'avx512'] if platform.machine() == 'x86_64' else [])]
    assert found == set(itertools.product(['loops', 'operator'], instructions))
    assert {f'{name}.sha256' for name in loops if name.endswith('.so')} <= loops
    carried |= {root / 'model-index.yml'}
    assert names - loops == {path.relative_to(root).as_posix() for path in package} | {
        f'aft_mm/.mim/{path.relative_to(root).as_posix()}' for path in carried
    }


def test_metadata(wheel):
    path, _, metadata, warnings = wheel
    assert 'C++ loops' not in warnings
    # The wheel depends on the processor but not on the Python version.
    system = sysconfig.get_platform().replace('-', '_')
    assert path.name == f'aft_mm-{aft_mm.__version__}-py3-none-{system}.whl'
    assert metadata['Version'] == aft_mm.__version__
    assert SpecifierSet(metadata['Requires-Python']) == PYTHON
    # What is stated for each Python is stated once for all.
    stated = re.findall(r'Python :: (3[.]\d+)', '\n'.join(metadata.get_all('Classifier')))
    assert stated == [f'3.{minor}' for minor in range(20) if PYTHON.contains(f'3.{minor}')]
    assert {'dev', 'downstream', 'export'} < set(metadata.get_all('Provides-Extra'))


def test_a_wheel_without_loops_is_for_every_platform(wheel, pure_wheel):
    path, names, _, warnings = pure_wheel
    assert path.name == f'aft_mm-{aft_mm.__version__}-py3-none-any.whl'
    assert 'without the C++ loops, AFT-conv and AFT-simple are several times slower' in warnings
    others = {name for name in wheel[1] if not name.endswith(('.so', '.so.sha256'))}
    assert set(names) == others
    with zipfile.ZipFile(path) as file:
        (name,) = [name for name in names if name.endswith('/WHEEL')]
        assert b'Root-Is-Purelib: true\nTag: py3-none-any\n' in file.read(name)


def test_the_package_page_has_the_links_of_the_readme(wheel, root):
    metadata = wheel[2]
    assert metadata['Description-Content-Type'] == 'text/markdown'
    urls = dict(text.split(', ') for text in metadata.get_all('Project-URL'))
    links = re.findall(r'(!?)\[[^]]*\]\((.+?)\)', metadata.get_payload())
    tag = 'main' if 'dev' in aft_mm.__version__ else f'v{aft_mm.__version__}'
    assert len(links) > 30 and urls.keys() >= {'Source', 'Documentation', 'Changelog', 'Issues'}
    for picture, link in links:
        if not link.startswith('https://arxiv.org/'):
            start = f'{urls["Source"]}/{"raw" if picture else "blob"}/{tag}/'
            assert link.startswith(start), link
            assert (root / link.removeprefix(start).partition('#')[0]).is_file(), link


def test_the_sdist_has_every_file_of_the_checkout(wheel, root):
    if not (root / '.git').exists():
        pytest.skip('an unpacked sdist has no list of the files of the checkout')
    tracked = subprocess.run(
        ['git', 'ls-files', '--cached'], cwd=root, check=True, capture_output=True, text=True
    )
    sources = (wheel[0].parent / 'aft_mm.egg-info/SOURCES.txt').read_text().splitlines()
    expected = {name for name in tracked.stdout.splitlines() if (root / name).exists()}
    assert expected == {name for name in sources if 'egg-info/' not in name}


def test_release_files_are_checked(wheel, pure_wheel, root, tmp_path):
    check = load_script('packaging/check_files').check
    name = f'aft_mm-{aft_mm.__version__}'
    linux = tmp_path / f'{name}-py3-none-manylinux_2_17_{platform.machine()}.whl'
    shutil.copy2(wheel[0], linux)
    shutil.copy2(pure_wheel[0], tmp_path)
    with tarfile.open(tmp_path / f'{name}.tar.gz', 'w:gz') as file:
        for path in files_below(root / 'aft_mm', *CARRIED):
            file.add(path, f'{name}/{path.relative_to(root)}')
        file.add(root / 'requirements/lock.txt', f'{name}/requirements/lock.txt')
    packages = [
        dict(name=pin.name, version=next(iter(pin.specifier)).version)
        for pin in licenses.pins(root / 'requirements/lock.txt')
    ]

    def write_sbom(version, components):
        sbom = dict(metadata=dict(component=dict(version=version)), components=components)
        (tmp_path / f'{name}.cdx.json').write_text(json.dumps(sbom))

    write_sbom(aft_mm.__version__, packages)
    weights = tmp_path / 'aft_mm_minis-1.0-py3-none-any.whl'
    with zipfile.ZipFile(weights, 'w') as target:
        for path in files_below(root / 'minis/aft_mm_minis', '*'):
            target.write(path, path.relative_to(root / 'minis'))
    check(tmp_path)
    write_sbom(None, packages)
    refuses('cdx.json must be of its version, got None', check, tmp_path)
    newer = dict(packages[0], version='999')
    for wrong in (packages[1:], [newer, *packages[1:]]):
        write_sbom(aft_mm.__version__, wrong)
        refuses(f'packages of the lock, not .*{packages[0]["name"]}', check, tmp_path)
    write_sbom(aft_mm.__version__, packages)
    with zipfile.ZipFile(weights, 'w') as target:
        target.writestr('aft_mm_minis/mnist.safetensors', b'0')
    refuses('aft_mm_minis.* must have the .*[.]safetensors of .*', check, tmp_path)
    shutil.copy2(pure_wheel[0], linux)
    refuses(r'must have loops.any, .*, got \[\]', check, tmp_path)
    with zipfile.ZipFile(wheel[0]) as source, zipfile.ZipFile(linux, 'w') as target:
        for entry in source.namelist():
            damaged = b'0' if entry.endswith('.so.sha256') else source.read(entry)
            target.writestr(entry, damaged)
    refuses('[.]so must have its sha256 next to it', check, tmp_path)
    linux.unlink()
    refuses('the files must be .*manylinux.*, got aft_mm', check, tmp_path)


@pytest.fixture(scope='module')
def elsewhere(wheel, tmp_path_factory):
    """Return the folder of a new environment with the wheel, and a function that starts commands.

    It shares the heavy packages of this environment. The checkout is not on its path.
    """
    folder = tmp_path_factory.mktemp('elsewhere')
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder / 'venv'], check=True)
    words = f'-m pip --python {folder}/venv/bin/python install -q --no-deps --no-index {wheel[0]}'
    subprocess.run([sys.executable, *words.split()], check=True, capture_output=True)
    # After the installation, so that pip sees no other aft_mm. Its .pth files are not read.
    (packages,) = folder.glob('venv/lib/python*/site-packages')
    (packages / 'heavy.pth').write_text(f'{sysconfig.get_path("purelib")}\n')

    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    for name in ('PYTHONPATH', 'VIRTUAL_ENV', 'AFT_MM_DATA'):
        environment.pop(name, None)

    def start(command, *words, **options):
        words = [folder / 'venv/bin' / command, *words]
        return subprocess.Popen(words, cwd=folder, env=environment, text=True, **options)

    return folder, start


@pytest.fixture(scope='module')
def call(elsewhere):
    """Return a function that runs a command and returns its exit code, output and errors."""
    _, start = elsewhere

    def run(command, *words):
        with start(command, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            output, errors = process.communicate(timeout=300)
        return process.returncode, output, errors

    return run


@pytest.fixture(scope='module')
def fork(elsewhere):
    """Return a function that runs code in a fork, and returns what it printed."""
    folder, start = elsewhere
    with (folder / 'imports').open('w') as imports:
        options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=imports)
        with start('python', '-c', FORKS, **options) as process:

            def run(code, *words):
                print(json.dumps([code, words or ['-c']]), file=process.stdin, flush=True)
                status = process.stdout.readline()
                printed = ''.join((folder / name).read_text() for name in ('imports', 'printed'))
                assert status == '0\n', printed[-4000:]
                return printed

            yield run


def test_the_quickstart_from_a_wheel(elsewhere, fork, root):
    """Trains, tests and plots without a checkout."""
    folder, _ = elsewhere
    words = 'quickstart --work-dir out --cfg-options train_cfg.max_epochs=1 param_scheduler=None'
    words = ['aft_mm', *words.split(), 'train_dataloader.dataset.indices=128']
    printed = fork('main()', *words)
    assert re.search(r'^accuracy: +\d+[.]\d\d % of the held-out fifth$', printed, re.M)
    assert re.search(r'^next: +source venv/bin/activate', printed, re.M)
    assert 'native backend used for aft_conv' in printed
    for name in ('epoch_1.pth', 'metrics.json', 'position_bias.png'):
        assert (folder / 'out' / name).stat().st_size
    assert str(root) not in printed  # nothing was loaded from the checkout


def test_the_configs_of_a_wheel_are_listed(call, root):
    status, output, errors = call('aft_mm', 'list', 'quickstart', '--measured')
    assert 'Top 1 Accuracy 98.1' in output and status == 0, errors
    configs = {path.stem for path in (root / 'configs').rglob('*.py') if '_base_' not in path.parts}
    assert set(call('aft_mm', 'list', '--names')[1].split()) == configs
    wrong = QUICKSTART.replace('digits', 'xdigits')
    message = f"Error: config '{wrong}' does not exist; did you mean {QUICKSTART}?\n"
    assert call('aft_mm', 'train', wrong)[2] == message


@pytest.mark.nightly
def test_guides_need_no_clone(elsewhere, fork, root):
    folder, _ = elsewhere
    words = [
        command.words[1:]
        for page in (*(f'docs/tasks/{guide}.md' for guide in GUIDES), 'docs/get_started.md')
        for command in commands(page)
        if command.words[0] == 'aft_mm'
    ]
    others = {
        command.words[0] for guide in GUIDES for command in commands(f'docs/tasks/{guide}.md')
    }
    assert others <= {'aft_mm', 'pip', 'find', 'cat', 'export'}
    named = {word for each in words for word in each if '_1xb' in word and '.' not in word}
    configs = [
        block
        for guide in GUIDES
        for block in python_blocks(guide)
        if block.startswith('_base_') and (find_spec('mmdet') or 'mmdet' not in block)
    ]
    if not find_spec('mmdet'):
        named = {name for name in named if not name.startswith(('retinanet', 'fcn'))}
    content = dict(commands=words, names=sorted(named), configs=configs)
    (folder / 'guides.json').write_text(json.dumps(content))
    parsed, built, place = fork(PARSE_AND_BUILD).split()[-3:]
    assert int(parsed) == len(words) > 60 and int(built) == len(named) + len(configs) > 10
    assert place.endswith('aft_mm/.mim') and not place.startswith(str(root))


@pytest.mark.nightly
def test_the_notebook_runs_from_the_wheel(elsewhere, fork, root):
    folder, _ = elsewhere
    cells = json.loads((root / 'docs/tutorials/own_images.ipynb').read_text())['cells']
    code = [
        ''.join(cell['source'])
        for cell in cells
        if cell['cell_type'] == 'code' and 'install' not in cell['metadata'].get('tags', ())
    ]
    text = '\n'.join(code).replace('max_epochs=40', 'max_epochs=2')
    assert text.count('max_epochs=2') == 1
    assert 'digits: 250 images of 5 classes, 64 x 64 pixels' in fork(text)
    lines = (folder / 'predictions/predictions.csv').read_text().splitlines()
    names = [line.split(',')[0] for line in lines[1:]]
    assert names[:2] == ['new_digits/0-50.png', 'new_digits/0-51.png'] and len(names) == 10


@pytest.mark.parametrize(
    'locks, extras',
    [
        ('lock dev weights', ' dev analysis export text speech timm weights'),
        ('downstream', 'downstream'),
    ],
)
def test_locks_are_within_the_ranges(wheel, root, locks, extras):
    pins = [
        pin for name in locks.split() for pin in licenses.pins(root / f'requirements/{name}.txt')
    ]
    checked = set()
    for requirement in map(Requirement, wheel[2].get_all('Requires-Dist')):
        marker = requirement.marker
        if locks == 'downstream' and not marker or requirement.name == 'aft_mm':
            continue
        if marker and not any(marker.evaluate({'extra': extra}) for extra in extras.split(' ')):
            continue
        found = [pin for pin in pins if pin.name == requirement.name]
        assert found, requirement.name
        for pin in found:
            (specifier,) = pin.specifier
            assert requirement.specifier.contains(specifier.version), (str(requirement), str(pin))
        checked.add(requirement.name)
    assert checked >= ({'mmdet', 'mmsegmentation'} if locks == 'downstream' else {'torch', 'timm'})
