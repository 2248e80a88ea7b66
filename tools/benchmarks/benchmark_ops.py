"""Measure time and memory of the AFT ops for each backend.

    python tools/benchmarks/benchmark_ops.py --list
    python tools/benchmarks/benchmark_ops.py --cases 'conv-*' --dtype bfloat16 --json out.json

Backends and other implementations (rivals) run in turn; times and ratios are medians over rounds.

A backend or rival that differs from the float64 oracle is reported as wrong and not timed.
"""

import argparse
import fnmatch
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from arguments import DTYPES, common_parser
from measuring import added_peak, both_clocks, in_fresh_process, profiled, ratio
from op_cases import CASES, BenchmarkCase
from parity import Oracle
from record import fill_in, set_up_torch, write_json
from rivals import RIVALS
from torch import Tensor

from aft_mm.ops import dispatch
from aft_mm.ops.cases import TOLERANCE
from aft_mm.ops.kernel_check import using

DEFAULTS = {
    'cpu': dict(backends=['native', 'eager', 'reference'], dtype=['float32'], rounds=15),
    'cuda': dict(backends=['triton', 'eager'], dtype=['bfloat16'], rounds=30),
}


MODES = ('forward', 'forward+backward')
# Maximum entries of a [B, T, T, D] product of the oracle if it is timed.
LARGEST_REFERENCE = 2**24


@dataclass(frozen=True)
class Form:
    case: BenchmarkCase
    name: str
    tensors: list[Tensor]
    call: Callable[..., Tensor]
    same_sum: bool

    @classmethod
    def of(cls, case: BenchmarkCase, name: str, tensors: list[Tensor]) -> 'Form':
        if name in dispatch.BACKENDS:
            return cls(case, name, tensors, partial(run_backend, name, case), True)
        rival = RIVALS[name]
        return cls(case, name, tensors, rival.make(tensors, case.options), rival.same_sum)

    def once(self, mode: str) -> Callable[[], object]:
        if mode == 'forward':
            return partial(torch.no_grad()(self.call), *self.tensors)
        inputs = [x.detach().requires_grad_() for x in self.tensors]
        cotangent = torch.randn_like(self.tensors[2])
        return partial(train, self.call, inputs, cotangent)


def run_backend(backend: str, case: BenchmarkCase, *tensors: Tensor) -> Tensor:
    with using(backend):
        return case(*tensors)


def train(call: Callable[..., Tensor], inputs: list[Tensor], cotangent: Tensor) -> None:
    """Run forward and backward; rivals may ignore an input."""
    torch.autograd.grad(call(*inputs), inputs, cotangent, allow_unused=True)


def reason_against(case: BenchmarkCase, name: str, tensors: list[Tensor]) -> str | None:
    if name not in dispatch.BACKENDS:
        return RIVALS[name].lacks
    if name == 'reference' and case.batch * case.tokens**2 * case.channels > LARGEST_REFERENCE:
        return 'the oracle would need too much memory'
    with using(name):
        reasons = dispatch.unsupported_reasons(name, case.op, tensors, case.all_options)
    return '; '.join(reasons) or None


def unsupported_by_all(args: argparse.Namespace) -> list[str]:
    reasons: dict[str, None] = {}
    for dtype in args.dtype:
        for name in args.names:
            tensors = CASES[name].tensors(getattr(torch, dtype), args.device)
            for backend in args.backends:
                reason = reason_against(CASES[name], backend, tensors)
                if reason is None:
                    return []
                reasons[f'{backend}: {reason}'] = None
    return list(reasons)


def verdict(form: Form, oracle: Oracle) -> dict:
    if not form.same_sum:
        return dict(status='ok', compared=False)
    errors = oracle.errors(form.call, form.tensors)
    allowed = TOLERANCE[form.tensors[2].dtype]
    wrong = [f'{k} by {error:.1e}' for k, error in errors.items() if not error <= allowed]
    if wrong:
        return dict(status='wrong', reason=f'{", ".join(wrong)} > {allowed:g}', errors=errors)
    return dict(status='ok', compared=True, errors=errors)


def admit(name: str, dtype: str, args: argparse.Namespace) -> tuple[list[dict], list[Form]]:
    case = CASES[name]
    tensors = case.tensors(getattr(torch, dtype), args.device)
    rows, forms, oracle = [], [], None
    for form_name in (*args.backends, *case.rivals):
        row = dict(case=name, op=case.op, dtype=dtype, form=form_name)
        rows.append(row)
        reason = reason_against(case, form_name, tensors)
        if reason is not None:
            row.update(status='not run', reason=reason)
            continue
        try:
            form = Form.of(case, form_name, tensors)
            oracle = oracle or Oracle.of(case, tensors)
            row.update(verdict(form, oracle))
            if row['status'] == 'ok':
                for mode in MODES:
                    form.once(mode)()
                forms.append(form)
        except torch.OutOfMemoryError:
            row.update(status='not run', reason='out of memory')
        except Exception as error:
            # Errors of other packages are reported; errors of our backends are raised.
            if form_name in dispatch.BACKENDS or RIVALS[form_name].package is None:
                raise
            row.update(status='not run', reason=f'{RIVALS[form_name].package} failed: {error}')
    return rows, forms


def cpu_peak(name: str, dtype: str, form_name: str, mode: str, threads: int) -> float:
    torch.set_num_threads(threads)
    case = CASES[name]
    # A small call of the same op initialises the libraries.
    small = next(c for n, c in CASES.items() if n.startswith('small-') and c.op == case.op)
    for each in (small, case):
        tensors = each.tensors(getattr(torch, dtype), 'cpu')
        peak = added_peak(Form.of(each, form_name, tensors).once(mode))
    return peak


def peak_memory(row: dict, form: Form, mode: str, args: argparse.Namespace) -> float:
    if torch.device(args.device).type == 'cuda':
        return added_peak(form.once(mode), args.device)
    return in_fresh_process(cpu_peak, row['case'], row['dtype'], form.name, mode, args.threads)


def microseconds(kernels: dict[str, float]) -> dict[str, float]:
    longest_first = sorted(kernels, key=kernels.get, reverse=True)
    return {name: round(kernels[name] * 1e6, 2) for name in longest_first}


def run_group(names: list[str], dtype: str, args: argparse.Namespace) -> list[dict]:
    admitted = {name: admit(name, dtype, args) for name in names}
    rows = []
    for mode in MODES:
        forms = {(n, form.name): form for n in names for form in admitted[n][1]}
        calls = {cell: form.once(mode) for cell, form in forms.items()}
        times, walls = both_clocks(calls, args.rounds, args.device)
        for row in [row for n in names for row in admitted[n][0]]:
            row = dict(row, mode=mode)
            rows.append(row)
            cell = (row['case'], row['form'])
            if cell not in times:
                continue
            form = forms[cell]
            row['milliseconds'] = statistics.median(times[cell]) * 1e3
            row['wall_milliseconds'] = statistics.median(walls[cell]) * 1e3
            if torch.device(args.device).type == 'cuda':
                row['kernels'] = microseconds(profiled(calls[cell], args.device))
            row['peak_mib'] = peak_memory(row, form, mode, args)
            row['speed_over'] = {
                other: ratio(times, (case, other), cell)
                for case, other in times
                if case == row['case'] and other != row['form']
            }
            unit = (form.case.baseline, form.name)
            if unit in times:
                row['time_over_baseline'] = ratio(times, cell, unit)
    return rows


def line(row: dict) -> str:
    start = f'{row["case"]:<38}{row.get("mode", "check"):<18}{row["form"]:<20}'
    if row['status'] != 'ok':
        return f'{start}{row["status"]}: {row["reason"]}'
    if 'milliseconds' not in row:
        return f'{start}{"equals the oracle" if row["compared"] else "runs, result not compared"}'
    text = f'{start}{row["milliseconds"]:10.3f} ms{row["peak_mib"]:9.1f} MiB'
    if not row['compared']:
        text += '   (result not compared)'
    if row['speed_over']:
        text += '   speed over ' + ', '.join(f'{k} {v:.2f}' for k, v in row['speed_over'].items())
    if 'time_over_baseline' in row:
        text += f'   time over baseline {row["time_over_baseline"]:.2f}'
    return text


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_parser(__doc__, DEFAULTS)
    parser.add_argument('--list', action='store_true', help='list the cases and exit')
    parser.add_argument(
        '--cases', metavar='PATTERN', help='cases, such as "conv-*"; default: all, on a CPU small-*'
    )
    parser.add_argument(
        '--backends', nargs='+', metavar='NAME', help='backends, as in AFT_MM_BACKEND'
    )
    parser.add_argument(
        '--check', action='store_true', help='compare results with the oracle without timing'
    )
    parser.add_argument('--dtype', nargs='+', choices=DTYPES, help='data types')
    args = parser.parse_args(arguments)
    fill_in(parser, args, DEFAULTS)
    for name in args.backends:
        if name not in dispatch.BACKENDS:
            known = ', '.join(dispatch.BACKENDS)
            parser.error(f'argument --backends: must be among {known}, got {name!r}')
    args.names = fnmatch.filter(CASES, args.cases or '*')
    if args.cases is None and not args.list:
        args.names = [n for n in args.names if n.startswith('small-') == (args.device == 'cpu')]
    if not args.names:
        parser.error(f'--cases must match one of {", ".join(CASES)}, got {args.cases!r}')
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse_args(arguments)
    if args.list:
        print('\n'.join(args.names))
        return 0
    set_up_torch(args)
    if reasons := unsupported_by_all(args):
        raise SystemExit('no backend can run any of the cases: ' + '; '.join(reasons))
    groups: dict[str, list[str]] = {}
    for name in args.names:
        groups.setdefault(CASES[name].baseline or name, []).append(name)
    rows = []
    for dtype in args.dtype:
        if args.check:
            added = [row for name in args.names for row in admit(name, dtype, args)[0]]
            print('\n'.join(map(line, added)), flush=True)
            rows += added
            continue
        for names in groups.values():
            added = run_group(names, dtype, args)
            print('\n'.join(map(line, added)), flush=True)
            rows += added
    write_json(args.json, rows, args)
    return int(any(row['status'] == 'wrong' and row['form'] in dispatch.BACKENDS for row in rows))


if __name__ == '__main__':
    raise SystemExit(main())
