"""The documentation site: notebook, error messages, a mixer outside the package, links."""

import ast
import json
import os
import re
import shutil
import subprocess
import types
from pathlib import Path

import pytest
import torch
import yaml
from mmengine.config import Config

import aft_mm
from aft_mm.engine.preflight import causal_problem, check_causal
from aft_mm.layers import AFTDecay, AFTMixer, Block, TokenMixer
from aft_mm.ops.native.availability import FOLDER, digest

from .documents import PAGES, ROOT, WRITTEN, blocks, text_of
from .errors import stops
from .helpers import each

TUTORIAL = 'docs/tutorials/own_mixer.md'
NOTEBOOK = ROOT / 'docs/tutorials/first_model.ipynb'
# Text of errors that other libraries raise.
FOREIGN = (
    "attribute 'find_loader'",
    'is not in the mmpretrain::model registry',
    'Input dimension should be at least 3',
    'The number of subfolders',
    'expected scalar type Float',
    'Weights only load failed',
)


@pytest.fixture
def decay(here, monkeypatch):
    (here / 'decay.py').write_text(blocks(TUTORIAL, 'python')[0])
    monkeypatch.syspath_prepend(here)
    return here / 'decay.py'


def own_config(folder, index, **options):
    text = blocks(TUTORIAL, 'python')[index]
    (folder / 'mine.py').write_text(text)
    config = Config.fromfile(folder / 'mine.py', import_custom_modules=False)
    config.merge_from_dict(options)
    config.dump(folder / 'mine.py')
    return folder / 'mine.py'


SHORT = {'train_cfg.max_epochs': 1, 'param_scheduler': None, 'visualizer.vis_backends': None}


def test_a_mixer_outside_the_package_trains_and_generates(decay, tool):
    part = {f'{part}_dataloader.dataset.indices': 64 for part in ('train', 'val')}
    part['train_cfg.val_interval'] = 1
    digits = own_config(decay.parent, 2, **SHORT, **part)
    tool('train').main([str(digits), '--work-dir', 'digits'])
    (log,) = decay.parent.glob('digits/*/*.log')
    assert 'Epoch(val) [1][1/1]    accuracy/top1' in log.read_text()

    (decay.parent / 'text').write_bytes(bytes(range(97, 123)) * 400)
    options = {f'{part}_dataloader.dataset.data_file': 'text' for part in ('train', 'test')}
    options |= dict.fromkeys(('val_cfg', 'val_dataloader', 'val_evaluator'))
    options |= {'train_dataloader.dataset.samples_per_epoch': 16, 'model.decoder.num_layers': 1}
    text = own_config(decay.parent, 3, **SHORT, **options)
    tool('train').main([str(text), '--work-dir', 'text-run'])
    words = 'text-run/epoch_1.pth --out samples.txt --prompt abc --num-chars 9'
    tool('sample').main([str(text), *words.split()])
    assert (decay.parent / 'samples.txt').stat().st_size > 3


@pytest.mark.parametrize('draws', [True, False])
def test_a_mixer_without_steps_cannot_generate(draws, tool, config, here, monkeypatch):
    hook = 'aft_mm.SampleHook' if draws else 'aft_mm.SanityCheckHook'
    (here / 'plain.py').write_text(
        'from mmengine.registry import MODELS\nfrom aft_mm.layers import TokenMixer\n'
        '@MODELS.register_module(force=True)\nclass Plain(TokenMixer):\n'
        '    def _mix(self, query, key, value, grid, key_mask):\n        return value\n'
    )
    monkeypatch.syspath_prepend(here)
    # mmengine shares the log of runs with the same name and start time.
    name = 'samples.py' if draws else 'no_samples.py'
    (here / name).write_text(
        f'_base_ = {config("tiny_pixels")!r}\n'
        'custom_imports = dict(imports=["aft_mm.registry", "recording_hooks", "plain"])\n'
        'model = dict(decoder=dict(token_mixer=dict(_delete_=True, type="Plain")))\n'
        f'default_hooks = dict(samples=dict(_delete_={not draws}, type="{hook}"))\n'
    )
    words = [name, '--work-dir', 'work', '--cfg-options', 'train_cfg.max_epochs=1']
    message = 'Plain has no _init_state and _mix_step: the model cannot be sampled from'
    if draws:
        stops(f'^Error: {message}, as SampleHook of the config', tool('train').main, words)
    else:
        tool('train').main(words)
        (log,) = here.glob('work/*/*.log')
        assert message in log.read_text()
    assert (here / 'work/epoch_1.pth').exists() != draws


FORGETS = """
from mmengine.registry import MODELS
from aft_mm.layers import AFTMixer

@MODELS.register_module(force=True)
class Forgets(AFTMixer):
    def _mix(self, query, key, value, grid, key_mask):
        return value.cumsum(1).flip(1).cumsum(1)  # as if causal were False
"""


def test_a_mixer_that_sees_later_tokens_does_not_train(tool, config, here, monkeypatch):
    (here / 'forgets.py').write_text(FORGETS)
    monkeypatch.syspath_prepend(here)
    (here / 'later.py').write_text(
        f'_base_ = {config("tiny_pixels")!r}\n'
        'custom_imports = dict(imports=["aft_mm.registry", "recording_hooks", "forgets"])\n'
        'model = dict(decoder=dict(token_mixer=dict(_delete_=True, type="Forgets")))\n'
        'default_hooks = dict(samples=dict(_delete_=True, type="aft_mm.SanityCheckHook"))\n'
    )
    message = '^Error: the mixer Forgets must be causal with causal=True, but later tokens change'
    stops(message, tool('train').main, ['later.py', '--work-dir', 'work'])
    assert not list(here.glob('work/*.pth'))


def steps(prefill=None, mix_step=None):
    """Return AFT-decay with the method of another mixer, or none of the base class."""
    methods = dict(_prefill=prefill, _mix_step=mix_step)
    body = {name: method for name, method in methods.items() if method is not None}
    return type('Changed', (AFTDecay,), body)(12, causal=True).eval()


def test_steps_that_differ_from_the_forward_are_named():
    def doubled(mixer, query, key, value, state):
        return AFTDecay._mix_step(mixer, query, key, 2 * value, state)

    assert causal_problem(steps(), 0) == ''
    assert causal_problem(steps().bfloat16(), 0) == ''
    signed = Block(
        12, dict(type='aft_mm.AFTConvSigned', num_heads=4, kernel_size=3, causal=True), (9,)
    )
    assert causal_problem(signed.token_mixer, 0) == ''  # which starts at 0
    sees_all = type('SeesAll', (AFTMixer,), dict(_mix=lambda self, q, k, v, *rest: v.mean(1, True)))
    late = sees_all(12, causal=True, grid=(70,))
    torch.nn.init.zeros_(late.proj.weight)
    assert 'later tokens change' in causal_problem(late, 0)
    said, fixed = [], type('Fixed', (AFTMixer,), dict(forward=lambda self, x, condition: x))
    logger = types.SimpleNamespace(info=said.append)
    check_causal({}, types.SimpleNamespace(model=fixed(12, causal=True), seed=0, logger=logger))
    assert 'the mixer Fixed was not tried as causal: ' in said[0] and 'condition' in said[0]
    message = 'a step after {} tokens differs from the forward: see {}'
    found = causal_problem(steps(prefill=TokenMixer._prefill), 0)
    assert message.format(4, '_prefill') in found
    found = causal_problem(steps(mix_step=doubled), 0)
    assert message.format(0, '_init_state and _mix_step') in found


def templates():
    """Yield every string of the code, with … in place of formatted values."""
    for folder in ('aft_mm', 'tools'):
        for path in (ROOT / folder).rglob('*.py'):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield ''.join(
                        part.value if isinstance(part, ast.Constant) else '…'
                        for part in node.values
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_errors_in_the_faq_are_those_of_the_code():
    messages = re.findall('^### `(.+)`$', (ROOT / 'docs/faq.md').read_text(), re.M)
    assert len(messages) > 15
    known = [text.replace('`', "'") for text in templates() if len(text.replace('…', '')) > 20]
    for message in messages:
        if not any(foreign in message for foreign in FOREIGN):
            like = [text for text in known if max(text.split('…'), key=len) in message]
            assert any(
                re.fullmatch(re.escape(text).replace('…', '.*'), message) for text in like
            ), f'no code raises {message!r}'


@pytest.mark.nightly
def test_the_notebook_runs_from_top_to_bottom(here, capsys):
    pytest.importorskip('IPython', reason='`make docs` installs IPython')
    cells = json.loads(NOTEBOOK.read_text())['cells']
    assert NOTEBOOK.stat().st_size < 100_000
    shown = [output['output_type'] for cell in cells for output in cell.get('outputs', [])]
    assert shown and 'error' not in shown
    code = '\n'.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code')
    exec(code, {})
    assert float(re.search(r'accuracy: ([\d.]+)%', capsys.readouterr().out)[1]) > 80  # chance is 10
    assert (here / 'position_bias.png').stat().st_size > 1000


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    assert citation['version'] == aft_mm.__version__ and citation['license'] == 'Apache-2.0'
    assert len(citation['references']) == 3


def test_ci_calls_make_targets():
    targets = set(re.findall(r'^([\w-]+):', (ROOT / 'Makefile').read_text(), re.M))
    called = set()
    for path in (ROOT / '.github/workflows').glob('*.yml'):
        jobs = yaml.safe_load(path.read_text())['jobs'].values()
        called |= {step['run'] for job in jobs for step in job['steps'] if 'run' in step}
    assert '.ci/run' in called
    called |= set(re.findall('^make .+', (ROOT / '.ci/run').read_text(), re.M))
    made = {line.removeprefix('make ') for line in called if line.startswith('make ')}
    assert {'audit', 'speed', 'wheels', 'release-check', 'check-tag'} <= made <= targets
    others = {line.split()[0] for line in called if not line.startswith('make ')}
    assert others == {'.ci/run', 'mv', 'gh', 'git'}


@pytest.mark.skipif(not shutil.which('make'), reason='needs make')
def test_make_test_rebuilds_the_loops_after_an_edit_of_a_header(tmp_path):
    """Without a build, test_native.py fails, since the name of the library has a digest."""
    native = tmp_path / 'aft_mm/ops/native'
    shutil.copytree(FOLDER, native, ignore=shutil.ignore_patterns('*.so*', '__pycache__'))
    names = 'setup.py requirements/lock.txt requirements/dev.txt Makefile pyproject.toml'
    names += ' requirements/weights.txt'
    files = [tmp_path / name for name in names.split()]
    for path in files:
        path.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path.relative_to(tmp_path), path)
    made = [tmp_path / f'.venv/{name}' for name in ('installed', 'development', 'loops', 'weights')]
    made[0].parent.mkdir()
    for now, path in enumerate((*files, *native.iterdir(), *made)):
        path.touch()
        os.utime(path, (now, now))

    def commands():
        return subprocess.check_output(['make', '-n', 'test'], cwd=tmp_path, text=True)

    before = digest(native)
    assert 'pytest' in commands() and 'build_ext' not in commands()
    with (native / 'conv.h').open('a') as header:
        header.write('// edited')
    assert 'build_ext' in commands() and digest(native) != before


def test_every_environment_variable_is_documented():
    page = (ROOT / 'docs/environment.md').read_text()
    code = ''.join(
        path.read_text()
        for folder in ('aft_mm', 'tools', 'configs')
        for path in (ROOT / folder).rglob('*.py')
    )
    names = set(re.findall(r'\bAFT_MM_[A-Z_]*[A-Z]', code))
    assert len(names) > 2 and names <= {*re.findall(r'`(\w+)`', page)}


def anchors(page):
    text = re.sub(r'^```.*?^```', '', text_of(page), flags=re.M | re.S)
    names = re.findall(r'^#+ (.+)$', text, re.M)
    return {re.sub(r'[^\w\- ]', '', name.lower()).replace(' ', '-') for name in names}


@each('page', PAGES)
def test_links_work_on_github(page):
    """Sphinx checks links too, but accepts further anchors of its own."""
    text = re.sub(r'^```.*?^```', '', text_of(page), flags=re.M | re.S)
    text = re.sub('`[^`]*`', '', text)
    for target in re.findall(r'\]\(([^()\s]+)\)', text):
        if re.match('[a-z]+:', target):
            continue
        file, _, anchor = target.partition('#')
        path = os.path.normpath((ROOT / page).parent / file) if file else str(ROOT / page)
        linked = os.path.relpath(path, ROOT)
        # Only pages that `make docs` writes may link to such pages.
        there = page in WRITTEN if linked in WRITTEN else Path(path).exists()
        assert there, f'{target} does not exist'
        assert not anchor or anchor in anchors(linked), f'{target} has no such heading'
