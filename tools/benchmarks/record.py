"""Settings of a run, and the JSON file with its rows and its environment."""

import argparse
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from arguments import named_in_errors

from aft_mm.analysis.collect_runs import commit, processor
from aft_mm.engine.allocator import keep_freed_memory
from aft_mm.errors import user_errors
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.native.availability import find_library
from aft_mm.outputs import check_writable

ROOT = Path(__file__).parents[2]
PACKAGES = ('torch', 'triton', 'timm', 'aft-pytorch')


def default_device() -> str:
    return 'cuda' if torch.cuda.is_available() else 'cpu'


def device_name(device: str) -> str:
    if torch.device(device).type == 'cuda':
        return torch.cuda.get_device_name(device)
    return processor()


def versions() -> dict[str, str | None]:
    installed: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = None
    return installed


def environment(args: argparse.Namespace, **more) -> dict:
    settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    return dict(
        device_name=device_name(args.device),
        machine=platform.machine(),
        commit=commit(),
        versions=versions(),
        threads=torch.get_num_threads(),
        loops=isinstance(find_library(), Path),
        backend=os.environ.get(ENVIRONMENT_VARIABLE),
        tf32=dict(
            matmul=torch.backends.cuda.matmul.allow_tf32, cudnn=torch.backends.cudnn.allow_tf32
        ),
        settings=settings,
        **more,
    )


def write_json(path: Path | None, rows: list[dict], args: argparse.Namespace, **more) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    content = dict(environment=environment(args, **more), rows=rows)
    path.write_text(json.dumps(content, indent=2) + '\n')


def fill_in(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    args.device = args.device or default_device()
    args.threads = args.threads or torch.get_num_threads()
    if args.json:
        with named_in_errors(parser, '--json'):
            check_writable('file', [str(args.json)])
    kind, _, index = args.device.partition(':')
    count = torch.cuda.device_count()
    with named_in_errors(parser, '--device'):
        if kind == 'cuda' and int(index or 0) >= count:
            raise ValueError(f'must be one of the {count} GPUs found, got {args.device!r}')
    for name, value in (defaults or {}).get(torch.device(args.device).type, {}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def set_up_torch(args: argparse.Namespace) -> None:
    with user_errors():
        args.freed_memory_kept = keep_freed_memory()
    torch.set_flush_denormal(True)  # as in a training
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
