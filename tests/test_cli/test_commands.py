"""The command aft_mm: imports, config names, copies, and the doctor."""

import re
import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
from mmengine.config import Config
from packaging.requirements import Requirement

from aft_mm.cli.arguments import choose_weights
from aft_mm.cli.commands import copy_config
from aft_mm.cli.commands.doctor import broken_imports, problems
from aft_mm.cli.main import COMMANDS, GROUPS, main, parse_args
from aft_mm.config.finding import configs_by_name, find_config, install_root, trained_models
from aft_mm.config.reading import READ
from aft_mm.errors import UserError

from ..errors import refuses_input, stops

HEAVY = {'torch', 'mmengine', 'numpy', 'matplotlib'}
OF_THE_REPOSITORY = {'compare_models', 'print_config', 'train_grid'}
OF_THE_REPOSITORY |= {'softmax_to_aft'}
QUICKSTART = 'aft-conv-quickstart_1xb64-50e_digits'
FITTING = """torch 2.11.0 torchvision 0.26.0 mmengine 0.10.7 mmcv-lite 2.1.0 mmcv 2.1.0
mmpretrain 1.2.0 mmdet 3.3.0 setuptools 81.0.0 opencv-python 5.0.0""".split()
FITTING = dict(zip(FITTING[::2], FITTING[1::2], strict=True))
NEEDED = 'torch>=2.4 mmengine>=0.10.7,<1 mmcv-lite>=2.1,<2.2 mmpretrain'
NEEDED = list(map(Requirement, NEEDED.split()))
BUILT_FOR = Requirement('torch==2.11.0')


def imports_of_help(call, words, end='assert not end.code'):
    script = (
        f'import os, runpy, sys\nfrom aft_mm.cli.main import main\nfor sys.argv in {words}:\n'
        f'    sys.path[0] = os.path.dirname(sys.argv[0])\n'
        f'    try: {call}\n    except SystemExit as end: {end}\n'
        'print(sorted({name.partition(".")[0] for name in sys.modules}))'
    )
    done = subprocess.run(
        [sys.executable, '-c', script], capture_output=True, text=True, check=True
    )
    *shown, imported = done.stdout.splitlines()
    assert 'aft_mm' in imported
    return shown, set(eval(imported))


def test_help_imports_nothing_heavy():
    """torch, mmengine or numpy would take seconds."""
    names = ['', *GROUPS, *COMMANDS]
    words = [['aft_mm', *name.split(), '--help'] for name in names] + [['aft_mm', 'plot']]
    shown, imported = imports_of_help('main()', words)
    for name in COMMANDS:
        assert f'usage: aft_mm {name} [-h]' in '\n'.join(shown)
    assert sum(line.startswith('usage: aft_mm') for line in shown) == len(words) > 25
    assert not [line for line in shown if 'python tools/' in line]
    # A wheel has tools/ and configs/ only.
    assert not re.findall(r'\b(?:docs|examples|packaging|requirements|tests)/\w+', '\n'.join(shown))
    assert not {*HEAVY, 'yaml'} & imported


def test_help_of_the_tools_imports_nothing_heavy():
    """Tools of the repository itself may: users do not call them."""
    tools = (install_root() / 'tools').rglob('*.py')
    tools = [path for path in tools if "if __name__ == '__main__':" in path.read_text()]
    tools = [path for path in tools if path.parent.name != 'benchmarks']
    tools = [str(path) for path in tools if path.stem not in OF_THE_REPOSITORY]
    shown, imported = imports_of_help(
        'runpy.run_path(sys.argv[0], run_name="__main__")', [[path, '--help'] for path in tools]
    )
    assert sum(line.startswith('usage: ') for line in shown) == len(tools) > 35
    assert not HEAVY & imported


def test_kinds_of_a_command():
    stops('KIND must be one of curves, .*; did you mean bias', main, ['plot', 'bia'])
    with pytest.raises(SystemExit, match="--out must end in .png or .*, got 'a.txt'"):
        main(['plot', 'keys', 'quickstart', 'no.pth', 'a.png', '--out', 'a.txt'])


@pytest.mark.parametrize(
    'words',
    [
        'plot keys quickstart no.pth ./mine.png --out mine.png',
        'convert subwords mine.model --vocab-size 9 --out mine.model',
        'test my.py my.pth --out mine.json',
        'browse my.py --split test --out mine.png',
    ],
)
def test_an_output_does_not_replace_what_a_command_reads(here, words):
    mine = words.split()[-1]
    (here / mine).write_bytes(b'mine')
    (here / 'my.pth').touch()
    data = f"test_dataloader = dict(dataset=dict(ann_file='{mine}'))"
    (here / 'my.py').write_text(f"_base_ = 'aft_mm::{QUICKSTART}'\n{data}\n")
    stops(f"Error: --out must not replace data, got '{mine}', a file that the", main, words.split())
    assert (here / mine).read_bytes() == b'mine'


@pytest.mark.parametrize('words', [['tran'], ['--no'], ['--', 'train', 'quickstart'], []])
def test_what_is_no_command_is_refused(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2 and 'COMMAND' in capsys.readouterr().err


def test_options_stand_anywhere(tool):
    words = ['--dpi', '50', 'quickstart', '--out', 'a.png', 'a.pth', '--num', '2', 'a.jpg', 'b.jpg']
    args = tool('plot keys').parse_args(words)
    assert (args.network, args.checkpoint, args.images) == (
        *('quickstart', 'a.pth'),
        ['a.jpg', 'b.jpg'],
    )


def test_own_data_are_refused_without_an_import_of_torch(tmp_path):
    (tmp_path / 'photos/cat').mkdir(parents=True)
    (tmp_path / 'photos/cat/1.jpg').write_bytes(b'')
    words = ['aft_mm', 'new', 'image-folder', str(tmp_path / 'photos')]
    shown, imported = imports_of_help('main()', [words], 'print(end)')
    assert shown[-1].endswith("must hold at least 2 classes, got 'cat'")
    assert not {'torch', 'mmengine', 'matplotlib'} & imported


def test_a_missing_library_has_a_one_line_message(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, 'yaml', None)
    monkeypatch.delitem(sys.modules, 'aft_mm.cli.commands.list_configs', raising=False)
    stops('^Error: `aft_mm list` needs yaml, which is not', main, ['list'])
    monkeypatch.setitem(sys.modules, 'sklearn.manifold', None)
    monkeypatch.delitem(sys.modules, 'aft_mm.analysis.plot_features', raising=False)
    words = ['quickstart', str(find_config(QUICKSTART)), '--out', str(tmp_path / 'a.png')]
    message = '^Error: `aft_mm plot features` needs sklearn.manifold, which is not'
    stops(message, main, ['plot', 'features', *words])


def test_a_command_without_memory_has_a_one_line_message(monkeypatch):
    def fails(args):
        raise MemoryError

    monkeypatch.setattr('aft_mm.analysis.model_complexity.run', fails)
    message = '^Error: `aft_mm complexity` needs more memory than it may take .out of memory.'
    stops(message, main, ['complexity', QUICKSTART])


def test_missing_files_are_reported_before_torch_is_imported():
    words = [
        ['train', 'no-such-config'],
        ['train', 'quickstart', '--resume', 'no.pth'],
        ['train', 'quickstart', '--resume', ''],
        ['test', 'quickstart', 'no.pth'],
        ['predict', 'no.py', 'no.pth', 'a.jpg', '--out', 'b'],
        ['predict', 'quickstart', str(find_config(QUICKSTART)), 'no folder', '--out', 'b'],
        ['new', 'coco', 'no folder'],
        ['plot', 'bias', 'no.py', '--out', 'a.png'],
        ['plot', 'explore', 'quickstart', 'no.pth', '--out', 'a.html'],
        ['plot', 'no'],
    ]
    shown, imported = imports_of_help('main()', [['aft_mm', *each] for each in words], 'print(end)')
    assert not HEAVY & imported
    assert [re.sub(';.*', '', line) for line in shown] == [
        "Error: config 'no-such-config' does not exist",
        "Error: checkpoint 'no.pth' does not exist",
        "Error: checkpoint '' does not exist",
        "Error: checkpoint 'no.pth' does not exist",
        "Error: config 'no.py' does not exist",
        "Error: PATH 'no folder' does not exist",
        "Error: PATH 'no folder' does not exist",
        "Error: config 'no.py' does not exist",
        "Error: checkpoint 'no.pth' does not exist",
        'Error: KIND must be one of curves, bias, keys, attention, receptive-field, cam, features, '
        "confusion, explore, got 'no'",
    ]


def test_a_reader_that_stops_is_no_error():
    command = [sys.executable, '-m', 'aft_mm', 'list']
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b''
        assert process.wait() == 0


class TestNames:
    def test_every_config_has_a_unique_name(self):
        files = (install_root() / 'configs').rglob('*.py')
        files = [path for path in files if '_base_' not in path.parts]
        assert len(files) == len(configs_by_name()) > 150

    @pytest.mark.parametrize(
        'name',
        [
            *(QUICKSTART, f'{QUICKSTART}.py', 'quickstart', 'image/conv-quickstart'),
            f'configs/image_classification/{QUICKSTART}.py',
            f'image_classification/{QUICKSTART}',
        ],
    )
    def test_our_configs_are_found_from_any_folder(self, name, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert find_config(name) == str(configs_by_name()[QUICKSTART])

    def test_a_file_takes_precedence_over_our_config(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / f'{QUICKSTART}.py').write_text('')
        assert find_config(f'{QUICKSTART}.py') == f'{QUICKSTART}.py'

    def test_a_part_of_several_names_is_refused(self):
        assert find_config('own/image-folder').endswith('_image-folder-64px.py')
        refuses_input(
            'must be part of one name, got .*: aft-conv-mini.*, .* …', find_config, 'aft-conv-mini'
        )
        with pytest.raises(UserError, match="config 'quickstart.py' does not exist; did you mean"):
            find_config('quickstart.py')

    @pytest.mark.parametrize(
        ('name', 'hint'),
        [
            ('detection/aft-conv-quickstart', f'; did you mean {QUICKSTART}'),
            ('own/image-foldr', '; did you mean .*image-folder'),
            (f'configs/detection/{QUICKSTART}.py', f'; did you mean {QUICKSTART}'),
            (QUICKSTART.replace('50e', '5e'), f'; did you mean {QUICKSTART}'),
            ('xyz.py', ''),
            ('fotos.py', r'; did you mean photos\.py\?'),
            ('own/foto', r'; did you mean own/photos\.py\?'),
            ('fotos', '; did you mean (?!photos.py)'),
            *((name, rf'; did you mean {name}\.py\?') for name in ('photos', 'own/photos')),
        ],
    )
    def test_close_names_are_suggested(self, name, hint, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / 'own').mkdir()
        for path in ('photos.py', 'own/photos.py'):
            (tmp_path / path).write_text('')
        with pytest.raises(UserError) as error:
            find_config(name)
        assert re.match(f'config {name!r} does not exist{hint}', str(error.value))
        stops('^Error: config', main, ['test', name, 'a.pth'])


@pytest.mark.parametrize('given', ['a.pth', 'run/last_checkpoint'])
def test_a_checkpoint_is_no_input(given):
    args = Namespace(checkpoint=given, files=['a.wav'])
    choose_weights(args, next(iter(trained_models())))
    assert (args.checkpoint, args.files) == (given, ['a.wav'])


def test_a_shell_completes_configs(monkeypatch, tmp_path):
    """With argcomplete, which reads the completer of an argument."""
    parsers = []
    monkeypatch.setenv('_ARGCOMPLETE', '1')
    monkeypatch.setitem(sys.modules, 'argcomplete', SimpleNamespace(autocomplete=parsers.append))
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'aft-conv-quick.py').touch()
    with pytest.raises(SystemExit):
        main(['list', '--task', 'no'])
    commands = parsers[0]._subparsers._group_actions[0].choices
    (config,) = [action for action in commands['train']._actions if action.dest == 'config']
    assert config.completer(prefix='aft-conv-quick') == [QUICKSTART, 'aft-conv-quick.py']


class TestCopies:
    def copy(self, *words):
        copy_config.run(parse_args('config', [QUICKSTART, *words]))

    @pytest.mark.parametrize('words', [[], ['--keep-bases']])
    def test_a_copy_is_the_same_config(self, words, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        self.copy(*words, '--out', 'new/a.py')
        copied, ours = (Config.fromfile(path) for path in ('new/a.py', find_config(QUICKSTART)))
        for key in READ & ours.keys():
            assert copied[key] == ours[key]
        # A variable at the top that was used already would change nothing.
        assert bool(words) or not copied.keys() - READ
        assert str(install_root()) not in open('new/a.py').read()
        assert ('_base_' in (tmp_path / 'new/a.py').read_text()) == bool(words)
        stops("^Error: 'new/a.py' exists already", self.copy, '--out', 'new/a.py')

    def test_options_are_written(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        self.copy('--cfg-options', 'train_cfg.max_epochs=7')
        assert Config.fromfile(f'{QUICKSTART}.py').train_cfg.max_epochs == 7
        with pytest.raises(SystemExit, match='--keep-bases and --cfg-options cannot be combined'):
            self.copy('--keep-bases', '--out', 'b.py', '--cfg-options', 'train_cfg.max_epochs=7')
        stops("--out must end in .py, got 'b'", self.copy, '--out', 'b')


class TestDoctor:
    @pytest.mark.parametrize(
        ('changes', 'python', 'message', 'fix'),
        [
            ({}, '3.14.1', 'Python 3.14.1 is not supported', 'python3.13 -m venv'),
            (dict(mmengine=None), '3.11.2', 'mmengine is missing', "'mmengine<1,>=0.10.7'"),
            (dict(mmengine='0.10.5'), '3.12.0', 'mmengine is 0.10.5, and aft_mm needs <1', '<1'),
            (
                dict(torch='2.12.1'),
                '3.11.2',
                'torchvision 0.26.0 is built for torch ==2.11.0, got torch 2.12.1',
                "pip install 'torch==2.12.1' torchvision",
            ),
            (dict(torch='2.11.0+cpu'), '3.11.2', 'CPU-only build', 'same index'),
            (
                {'onedl-mmengine': '0.10.12'},
                '3.11.2',
                'mmengine and onedl-mmengine are all installed',
                'pip uninstall -y mmengine onedl-mmengine',
            ),
            (
                {'opencv-python-headless': '5'},
                *('3.11.2', 'contain the module cv2', 'pip uninstall'),
            ),
            (
                {'mmcv': '2.2.0'},
                *('3.13.0', 'mmcv is 2.2.0, and aft_mm needs <2.2,>=2.1'),
                "pip uninstall -y mmcv-lite mmcv; pip install 'mmcv-lite<2.2,>=2.1'",
            ),
        ],
    )
    def test_problems_are_reported_with_their_fix(self, changes, python, message, fix):
        assert not list(problems(FITTING, '3.11.7', NEEDED, BUILT_FOR))
        versions = {name: version for name, version in {**FITTING, **changes}.items() if version}
        (found,) = problems(versions, python, NEEDED, BUILT_FOR)
        assert message in found[0] and fix in found[1]

    def test_a_fork_stands_in_for_openmmlab(self):
        fork = {name: version for name, version in FITTING.items() if not name.startswith('mm')}
        fork |= {'onedl-mmengine': '0.10.12', 'onedl-mmcv': '2.3', 'onedl-mmpretrain': '1.3.6'}
        assert not list(problems(fork, '3.12.0', NEEDED, BUILT_FOR))

    def test_a_missing_module_is_reported(self, monkeypatch):
        def fails(name):
            if name == 'mmcv':
                raise ModuleNotFoundError("No module named 'cv2'", name='cv2')
            if name == 'torchvision':
                raise RuntimeError('operator torchvision::nms\ndoes not exist')

        monkeypatch.setattr('aft_mm.cli.commands.doctor.is_installed', lambda name: True)
        monkeypatch.setattr('aft_mm.cli.commands.doctor.importlib.import_module', fails)
        vision, mmcv = broken_imports()
        assert 'RuntimeError: operator torchvision::nms does not exist' in vision[0]
        assert vision[1] == 'pip install --force-reinstall --no-deps torchvision'
        assert mmcv[1] == 'pip install opencv-python'

    def test_doctor_shows_this_environment(self, tool, capsys, monkeypatch, tmp_path):
        (tmp_path / 'mnist').mkdir()
        monkeypatch.setenv('AFT_MM_DATA', str(tmp_path))
        monkeypatch.setattr('aft_mm.cli.commands.doctor.problems', lambda *_: [('a', 'b')])
        with pytest.raises(SystemExit) as end:
            tool('doctor').main([])
        out = capsys.readouterr().out
        assert end.value.code == 1 and out.startswith('wrong: a; to do: b\n\naft_mm ')
        missing = out.partition('missing: ')[2]
        assert 'found: mnist\n' in out and 'cifar10' in missing and 'my_images' not in missing
        assert 'aft_conv_step' not in out and 'torch 2' in out
        assert 'operators of mmcv: torchvision\n' in out or 'operators of mmcv: compiled\n' in out

    def test_an_unknown_backend_is_reported(self, tool, capsys, monkeypatch):
        monkeypatch.setenv('AFT_MM_BACKEND', 'tritn')
        with pytest.raises(SystemExit):
            tool('doctor').main([])
        found = capsys.readouterr().out
        assert re.match(
            "wrong: AFT_MM_BACKEND .* got 'tritn'; to do: unset AFT_MM_BACKEND\n", found
        )

    def test_a_sound_environment_is_said_first(self, tool, capsys, monkeypatch):
        monkeypatch.setattr('aft_mm.cli.commands.doctor.problems', lambda *_: [])
        tool('doctor').main(['--backends'])
        out = capsys.readouterr().out
        assert out.startswith('fine: ') and re.search('\naft_conv_step +cpu .*used', out)
        assert 'aft_mm.cli.commands.train' in tool('doctor').IMPORTED


def test_list_filters(tool, capsys, monkeypatch):
    monkeypatch.setattr('aft_mm.cli.commands.list_configs.is_installed', lambda _: False)

    def names(*words):
        tool('list').main([*words, '--names'])
        return capsys.readouterr().out.split()

    assert names('quickstart') == names('aft-conv-quick*') == [QUICKSTART]
    ready, every = names('--ready'), names()
    assert set(every) == set(configs_by_name()) and set(ready) < set(every)
    needy = 'detection segmentation machine_translation speech_recognition super_resolution'.split()
    others = {configs_by_name()[name].parent.name for name in set(every) - set(ready)}
    assert others == set(needy)
    assert set(names('--task', 'image_ar')) == {
        name for name, path in configs_by_name().items() if path.parent.name == 'image_ar'
    }
    tool('list').main([names('--task', 'detection')[0]])
    header, row = capsys.readouterr().out.splitlines()
    assert re.search('  libraries$', header) and re.search('  mmdet missing: .*', row)
    tool('list').main([QUICKSTART])
    assert capsys.readouterr().out.endswith('  installed\n')
    measured = names('--measured')
    assert QUICKSTART in measured and 'retinanet-aft-conv-tiny_8xb2-1x_voc0712' not in measured
    stops('--task must be one of copy_task, .*, got .detecton', names, '--task', 'detecton')
    stops('no config matches all arguments', names, 'no-such-model')
