"""The arguments of every command, a function each, and here what several have; no slow imports."""

import argparse
import ast
import glob
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aft_mm.analysis import AtMost
from aft_mm.checks import check_int
from aft_mm.config.finding import configs_by_name, own_weights, trained_models
from aft_mm.errors import UserError
from aft_mm.outputs import MAX_DPI, PICTURES, POINTER, check_output

#: Value of ``--resume`` without a path; no file can have this name.
LATEST = '\0latest'
#: Ends of the names of checkpoints, of the file that names one, and of exported files.
WEIGHTS = ('.pth', '.pt', '.safetensors', POINTER, '.onnx', '.xml', '.pt2')
#: Stands for a space in a value for mmengine; no argument can hold it.
SPACE = '\0'
#: Help text of the selection of layers or heads.
LAYERS = "'all', 'first:4', 'even:6' or numbers as in '0,5,11'"


def tool_parser(about: str | None) -> argparse.ArgumentParser:
    """Return the parser of a program of tools/, given its docstring."""
    return argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


class Options(argparse.Action):
    """mmengine's KEY=VALUE arguments, with the spaces of texts and an error message for others."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        for value in values:
            if not value.partition('=')[0] or '=' not in value:
                parser.error(f'{option_string} needs KEY=VALUE, got {value!r}')
            if 'dict(' in value or _holds_braces(value.partition('=')[2]):  # texts to mmengine
                parser.error(f'{option_string} takes no dict as value, got {value!r}')
        from mmengine.config import DictAction

        take = DictAction(self.option_strings, self.dest, nargs='+')
        try:
            take(parser, namespace, [_mark_spaces(value) for value in values], option_string)
        except (AssertionError, RecursionError):
            parser.error(f'{option_string} needs balanced brackets, got {" ".join(values)!r}')
        setattr(namespace, self.dest, _with_spaces(getattr(namespace, self.dest)))


def _mark_spaces(option: str) -> str:
    """Return KEY=VALUE with a mark for the spaces of texts, as mmengine removes all spaces."""
    key, _, value = option.partition('=')
    value = value.strip()
    if ',' in value or value.startswith(('(', '[')):
        value = re.sub(r'(?<=[,(\[]) +| +(?=[,)\]])', '', value)
    return f'{key}={value.replace(" ", SPACE)}'


def _with_spaces(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_spaces(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_with_spaces, value))
    return value.replace(SPACE, ' ') if isinstance(value, str) else value


def _holds_braces(text: str) -> bool:
    try:
        nodes = [*ast.walk(ast.parse(text, mode='eval'))]
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return any(isinstance(node, ast.Dict | ast.Set) for node in nodes)


def add_flag(parser: argparse.ArgumentParser, name: str, about: str) -> None:
    parser.add_argument(name, action='store_true', help=about)


def add_value(
    parser: argparse.ArgumentParser, name: str, default: Any, about: str, **options: Any
) -> None:
    """Add a number, text or path; its type is that of the default, which the help states."""
    kind = next(kind for kind in (int, float, str, Path) if isinstance(default, kind))
    # argparse forgets the default of an intermixed positional before it prints the help.
    about = f'{about} (default: {default})'
    parser.add_argument(name, type=kind, default=default, help=about, **options)


def add_config_options(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=Options,
        default={},
        metavar='KEY=VALUE',
        help=f'override entries of the config, such as {example}',
    )


def add_run_arguments(parser: argparse.ArgumentParser, work_dir: str = 'work_dirs/NAME') -> None:
    parser.add_argument('--work-dir', help=f'folder of the output (default: {work_dir})')
    add_config_options(parser, 'train_cfg.max_epochs=10')
    launchers = ('none', 'pytorch', 'slurm', 'mpi')
    add_value(parser, '--launcher', 'none', 'launcher of a distributed run', choices=launchers)
    add_flag(parser, '--no-pin-memory', 'pin_memory=False in all data loaders')
    add_flag(parser, '--no-persistent-workers', 'persistent_workers=False in all data loaders')
    # torch.distributed.launch passes it.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)


def add_sampling_arguments(parser: argparse.ArgumentParser, temperature: float = 1.0) -> None:
    parser.add_argument(
        '--temperature', type=float, help=f'divides the logits (default: {temperature})'
    )
    parser.add_argument('--top-k', type=int, help='sample among the k most likely values')
    parser.add_argument(
        '--top-p', type=float, help='sample among the most likely values with this probability'
    )
    add_flag(parser, '--greedy', 'always take the most likely value')
    parser.add_argument('--seed', type=int, help='random seed (default: 0)')
    parser.add_argument('--device', help='device (default: an accelerator if there is one)')
    add_flag(
        parser,
        '--compile',
        'compile the step of a token on a CPU, which takes seconds to minutes; use it for many or '
        'long samples',
    )
    add_config_options(parser, 'test_dataloader.dataset.data_root=DIR')


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    options = {name: getattr(args, name) for name in ('top_k', 'top_p', 'greedy')}
    if args.greedy:
        names = ('temperature', 'top_k', 'top_p', 'seed')
        refuse_given(args, names, 'and --greedy cannot be combined: nothing is sampled')
    if args.temperature is not None:
        options['temperature'] = args.temperature
    return dict(**options, seed=args.seed or 0, compiled=args.compile)


def add_config(parser: argparse.ArgumentParser) -> None:
    action: Any = parser.add_argument(
        'config',
        metavar='CONFIG',
        help='path of a config, or a name or part of one listed by `aft_mm list`',
    )
    action.completer = complete_config  # read by argcomplete


def complete_config(prefix: str, **_: Any) -> list[str]:
    """Return the configs and files that begin with ``prefix``, for the completion of a shell."""
    known = [*trained_models(), *configs_by_name()]
    names = [name for name in known if name.startswith(prefix)]
    return [*names, *glob.glob(f'{glob.escape(prefix)}*')]


def add_model(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        'checkpoint',
        nargs='?',
        metavar='CHECKPOINT',
        help='path, https:// or hf:// address; not needed for a model that `aft_mm list` shows as trained',
    )
    parser.set_defaults(takes_own_weights=True)


def choose_weights(args: argparse.Namespace, name: str) -> None:
    """Without CHECKPOINT, take the weights that come with the model of CONFIG, given as `name`."""
    weights = own_weights(name)
    inputs = next((getattr(args, kind) for kind in ('inputs', 'files') if kind in args), None)
    given = args.checkpoint
    if weights and inputs is not None and given and '://' not in given:
        if not given.endswith(WEIGHTS):
            inputs.insert(0, given)
            args.checkpoint = None
    if args.checkpoint is None:
        if weights is None:
            raise UserError(
                f'CHECKPOINT must be given, since no weights come with {name!r}, only with '
                f'{", ".join(trained_models())}'
            )
        args.checkpoint = weights


def add_trained(parser: argparse.ArgumentParser, about: str) -> None:
    """Add ``network``, a config or what else `about` says, and its checkpoint."""
    parser.add_argument('network', metavar='CONFIG', help=about)
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='path of the checkpoint')


def add_split(parser: argparse.ArgumentParser, default: str) -> None:
    add_value(parser, '--split', default, 'part of the data', choices=('train', 'val', 'test'))


def add_average(parser: argparse.ArgumentParser) -> None:
    about = 'average the weights of CHECKPOINT, such as epoch_100.pth, and the N - 1 before it'
    add_value(parser, '--average', 1, about, metavar='N')


def add_picture_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--out', required=True, metavar='PNG', help='path of the picture')
    add_value(parser, '--dpi', 150, 'dots per inch')


def check_picture(args: argparse.Namespace) -> None:
    if args.out:
        check_output('--out', args.out, PICTURES, getattr(args, 'images', ()))
    check_int('--dpi', args.dpi, 1, MAX_DPI)
    if getattr(args, 'csv', None):
        check_output('--csv', args.csv, ('.csv',))


def add_image_arguments(parser: argparse.ArgumentParser, num: int, noise: bool = False) -> None:
    """Add images, ``--num`` and, with ``noise``, ``--noise``: the input of a network."""
    parser.add_argument(
        'images',
        nargs='*',
        metavar='IMAGE',
        help='image files (default: --num images of the test split)',
    )
    if noise:
        add_flag(parser, '--noise', 'N(0, 1) instead of images')
    add_value(parser, '--num', AtMost(num), 'number of images')


def add_choice_arguments(
    parser: argparse.ArgumentParser, heads: bool = True, layers: str = LAYERS
) -> None:
    parser.add_argument('--layers', default='all', help=layers)
    if heads:
        add_value(parser, '--heads', 'even:12', LAYERS)


def add_network_arguments(parser: argparse.ArgumentParser, num: int) -> None:
    """Add a network of any library, its checkpoint if any, its input, a table and the picture."""
    parser.add_argument(
        'network',
        metavar='NETWORK',
        help='a config of aft_mm or mmpretrain, a model name of mmpretrain, or timm:NAME',
    )
    parser.add_argument(
        'checkpoint', metavar='CHECKPOINT', nargs='?', help='path of the checkpoint'
    )
    add_image_arguments(parser, num, noise=True)
    parser.add_argument('--csv', metavar='CSV', help='also write the numbers to this file')
    add_picture_arguments(parser)


def add_runs(parser: argparse.ArgumentParser, kind: str) -> None:
    parser.add_argument('logs', nargs='*', metavar='[LABEL=]LOG', help=f'{kind} of a run')
    parser.add_argument(
        '--group',
        nargs='+',
        action='append',
        default=[],
        metavar=('LABEL', 'LOG'),
        help='runs with different seeds, shown as mean and standard error',
    )


def refuse_given(args: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Raise a UserError with the reason if an option without a default was given."""
    for name in names:
        if getattr(args, name) is not None and getattr(args, name) is not False:  # 0 is given
            raise UserError(f'--{name.replace("_", "-")} {reason}')
