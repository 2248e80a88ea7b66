"""The programs of tools/ as commands: `aft_mm plot cam ...` runs tools/analysis_tools/plot_cam.py."""

import ast
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from aft_mm.config.finding import install_root, similar_names
from aft_mm.errors import UserError, user_errors

GROUPS = {
    'plot': 'Plot a training, a model or its predictions.',
    'compare': 'Compare runs, or groups of runs with several seeds.',
    'convert': 'Convert data sets, vocabularies and checkpoints.',
}
#: The program of each command, or of each kind of a command.
PROGRAMS: Mapping[str, str | Mapping[str, str]] = {
    'plot': {
        'curves': 'analysis_tools/plot_curves.py',
        'bias': 'analysis_tools/plot_position_bias.py',
        'keys': 'analysis_tools/plot_keys.py',
        'attention': 'analysis_tools/plot_attention.py',
        'receptive-field': 'analysis_tools/plot_receptive_field.py',
        'cam': 'analysis_tools/plot_cam.py',
        'features': 'analysis_tools/plot_features.py',
        'confusion': 'analysis_tools/confusion_matrix.py',
        'explore': 'analysis_tools/explore.py',
    },
    'compare': {
        'runs': 'analysis_tools/compare_runs.py',
        'seeds': 'analysis_tools/compare_seeds.py',
        'collect': 'analysis_tools/collect_runs.py',
    },
    'convert': {
        'enwik8': 'dataset_converters/enwik8.py',
        'subwords': 'dataset_converters/subwords.py',
        'wmt14': 'dataset_converters/wmt14.py',
        'shapenet': 'dataset_converters/shapenet.py',
        'deit': 'model_converters/deit_to_aft.py',
        'average': 'model_converters/average_checkpoints.py',
    },
    'complexity': 'analysis_tools/model_complexity.py',
    'reference-bits': 'analysis_tools/reference_bits.py',
    'browse': 'analysis_tools/browse_dataset.py',
    'demo': 'analysis_tools/demo.py',
    'export': 'model_converters/export_onnx.py',
    'publish': 'model_converters/publish_model.py',
    'split': 'dataset_converters/split_folder.py',
    'number-masks': 'dataset_converters/number_masks.py',
}


def summary(program: str) -> str:
    try:
        text = (install_root() / 'tools' / program).read_text(encoding='utf-8')
    except (UserError, OSError):  # reported by the command, such as doctor
        return ''
    return (ast.get_docstring(ast.parse(text)) or '').partition('\n')[0]


def run_program(argv: Sequence[str]) -> None:
    """Run the program of a command, given the command, its kind if it has several, and its arguments."""
    command, *rest = argv
    program = PROGRAMS[command]
    if not isinstance(program, str):
        if not rest or rest[0] in ('-h', '--help'):
            print(f'usage: aft_mm {command} KIND ...\n')
            for kind, path in program.items():
                print(f'  {kind:17}{summary(path)}')
            print(f'\nSee `aft_mm {command} KIND --help` for the arguments of a kind.')
            return
        kind, *rest = rest
        with user_errors():
            if kind not in program:
                close = similar_names(kind, program)
                raise UserError(
                    f'KIND must be one of {", ".join(program)}, got {kind!r}'
                    + (f'; did you mean {close[0]}?' if close else '')
                )
        command, program = f'{command} {kind}', program[kind]
    with user_errors():
        file = install_root() / 'tools' / program
    before = sys.argv, sys.path[:], sys.modules['__main__']
    sys.argv = [f'aft_mm {command}', *rest]
    sys.path.insert(0, str(file.parent))  # for imports between programs
    code = compile(file.read_text(encoding='utf-8'), str(file), 'exec')
    module = ModuleType('__main__')
    module.__file__ = str(file)
    sys.modules['__main__'] = module  # by which functions reach the workers of a pool
    try:  # runpy would change sys.argv[0], the name in messages
        exec(code, module.__dict__)
    finally:
        sys.argv, sys.path[:], sys.modules['__main__'] = before
