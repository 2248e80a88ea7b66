"""Random calls of the C++ loops under the address and undefined-behaviour sanitizers.

    make sanitize                                    # or:
    python tests/sanitize_loops.py --calls 600 --seconds 600 --seed 1

The loops are built into build/sanitize, for every set of instructions. Output and gradients of
calls with random shapes, strides, dtypes, masks, gates and numbers of threads are compared with the
float64 oracle. A report of a sanitizer ends the process.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / 'build/sanitize'
FLAGS = '-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer'
LARGEST = 4_000_000  # numbers of the oracle, which has [B, T, T, D] in memory
TOLERANCE = {'float32': 2e-4, 'bfloat16': 3e-2}


def build() -> None:
    flags = {
        name: f'{os.environ.get(name, "")} {FLAGS}' for name in ('CFLAGS', 'CXXFLAGS', 'LDFLAGS')
    }
    command = [sys.executable, 'setup.py', '-q', 'build_ext', '--build-lib', FOLDER]
    subprocess.run(
        [*command, '--build-temp', FOLDER / 'objects'], cwd=ROOT, env=os.environ | flags, check=True
    )


def restart() -> None:
    """Replace this process by one that loads the runtime of the sanitizers first."""
    compiler = os.environ.get('CXX', 'c++')
    runtimes = [
        subprocess.check_output([compiler, f'-print-file-name={name}'], text=True).strip()
        for name in ('libasan.so', 'libubsan.so')
    ]
    options = dict(
        LD_PRELOAD=':'.join(runtimes),
        ASAN_OPTIONS='detect_leaks=0:abort_on_error=0',  # Python does not free all at exit
        UBSAN_OPTIONS='print_stacktrace=1',
        PYTHONPATH=str(ROOT),
        AFT_MM_BACKEND='native',
    )
    os.execve(sys.executable, [sys.executable, *sys.argv, '--built'], os.environ | options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--calls', type=int, default=600)
    parser.add_argument('--seconds', type=float, default=180, help='stop after this time')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--built', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.built:
        build()
        restart()
    fuzz(args.calls, args.seconds, args.seed)


def fuzz(calls: int, limit: float, seed: int) -> None:
    import torch

    from aft_mm.ops.native import availability

    capability = torch.backends.cpu.get_cpu_capability()
    here = availability.INSTRUCTIONS.get(capability, 'any')
    sets = ('any', 'avx2', 'avx512')[: ('any', 'avx2', 'avx512').index(here) + 1]
    libraries = [FOLDER / availability.library_path(name).relative_to(ROOT) for name in sets]
    choose = random.Random(seed)
    torch.manual_seed(seed)
    start, counts, wrong = time.perf_counter(), {}, 0
    for call in range(calls):
        if time.perf_counter() - start > limit:
            break
        library = choose.choice(libraries)
        availability.find_library = lambda library=library: library
        name, error, tolerance = random_call(choose)
        used = f'{name}, {library.name.split(".")[1]}'
        counts[used] = counts.get(used, 0) + 1
        if not error <= tolerance:
            wrong += 1
            print(f'call {call} of {used} differs from the oracle by {error:.1e}')
    for used, count in sorted(counts.items()):
        print(f'{used}: {count} calls')
    seconds = time.perf_counter() - start
    print(
        f'{sum(counts.values())} calls in {seconds:.0f} s: {wrong} wrong, no report of a sanitizer'
    )
    sys.exit(wrong > 0)


def random_call(choose: random.Random) -> tuple[str, float, float]:
    import torch

    from aft_mm import ops

    torch.set_num_threads(choose.randint(1, 4))
    dtype = choose.choice(list(TOLERANCE))
    gate = choose.choice(['sigmoid', 'relu', 'none'])
    options, parameters = dict(gate=gate), []
    kind = choose.choice(['simple', 'decay', 'full', 'conv', 'conv'])
    if kind != 'conv':
        tokens, channels = choose.randint(2, 150), choose.randint(1, 150)
        heads, function = channels, getattr(ops, f'aft_{kind}')
        options['causal'] = kind == 'simple' or choose.random() < 0.4
        parameters = [0.3 * torch.randn(channels)] if kind == 'decay' else []
    else:
        grid = [choose.randint(1, 14) for _ in range(choose.randint(1, 2))]
        tokens, heads = torch.Size(grid).numel(), choose.randint(1, 40)
        channels, function = heads * choose.choice([1, 1, 2, 3, 7, 20]), ops.aft_conv
        kernel = [2 * choose.randint(0, 7) + 1 for _ in grid]
        scale = choose.choice([0.3, 3])  # w below -3 needs the additive form
        parameters = [scale * torch.randn(heads, *kernel)]
        options.update(
            grid=tuple(grid),
            causal=choose.random() < 0.4,
            global_connectivity=choose.random() < 0.7,
        )
    most = max(1, LARGEST // (tokens**2 * channels))
    batch = choose.randint(1, min(19, most))
    if kind == 'full':
        options['num_heads'] = choose.choice([n for n in range(1, 7) if channels % n == 0])
        parameters = [3 * torch.randn(batch, options['num_heads'], tokens, tokens)]
        if choose.random() < 0.5:
            options['pair_mask'] = torch.rand(batch, tokens, tokens) < 0.7
    if choose.random() < 0.5:
        options['key_mask'] = torch.rand(batch, tokens) < 0.7
    sizes = [channels] * (gate != 'none') + [heads, channels]
    tensors = [random_strides(torch.randn(batch, tokens, size), choose) for size in sizes]
    tensors[-2] = tensors[-2] * choose.choice([1, 1, 10, 1000])
    tensors = [x.to(getattr(torch, dtype)) for x in tensors]
    leaves = [x.detach().requires_grad_(choose.random() < 0.8) for x in (*tensors, *parameters)]
    cotangent = random_strides(torch.randn(batch, tokens, channels), choose)
    got = run(function, leaves, gate, cotangent, options)
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in leaves]
    os.environ['AFT_MM_BACKEND'] = 'reference'
    expected = run(function, wide, gate, cotangent, options)
    os.environ['AFT_MM_BACKEND'] = 'native'
    errors = [
        ((a.double() - b).abs().max() / b.abs().max().clamp_min(1)).item()
        for a, b in zip(got, expected, strict=True)
    ]
    return function.__name__, max(errors), TOLERANCE[dtype]


def random_strides(x, choose: random.Random):
    """Return x, a part of wider memory, or x with its dimensions stored in another order."""
    import torch

    kind = choose.randint(0, 3)
    if kind == 1:
        return torch.cat([x, x], -1)[..., x.shape[-1] :]
    if kind == 2:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if kind == 3 else x


def run(function, leaves, gate: str, cotangent, options) -> list:
    import torch

    tensors = leaves if gate != 'none' else [None, *leaves]
    output = function(*tensors, **options)
    wanted = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad(output, wanted, cotangent.to(output.dtype)) if wanted else ()
    return [output.detach(), *grads]


if __name__ == '__main__':
    main()
