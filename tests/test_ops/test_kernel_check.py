"""The check of the kernels: which forms it runs, and their compilation in threads."""

import copy
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip('triton', reason='Triton is not installed')
from kernel_forms import PROCESSORS, OfflineDriver, recorded_forms  # noqa: E402
from triton.runtime import JITFunction, driver  # noqa: E402

from aft_mm.layers.mixers import AFTMixer  # noqa: E402
from aft_mm.ops import selftest  # noqa: E402
from aft_mm.ops.cases import simple  # noqa: E402
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE  # noqa: E402
from aft_mm.ops.triton import availability  # noqa: E402
from aft_mm.ops.triton.compile_ahead import compile_only  # noqa: E402

from ..all_configs import build_model, configs_of, load_config  # noqa: E402

if availability.interpreted():
    pytest.skip("Triton's interpreter does not compile", allow_module_level=True)
TASKS = 'image_classification', 'image_ar', 'language_modeling', 'copy_task', 'super_resolution'
TASKS += 'point_cloud', 'machine_translation', 'speech_recognition'
OPS = [op for op in availability.KERNELS if not op.endswith('_step')]
CPU, TYPE = torch.device('cpu'), torch.bfloat16


def pairs_on_a_device(op):
    def empty(*size, device, **options):
        return torch.zeros(1, **options)

    with mock.patch.object(selftest.torch, 'empty', empty):
        return selftest.check_cases(op, SimpleNamespace(type='cuda'), TYPE)


def length(mixer):
    return torch.Size(mixer.grid or (1024,)).numel()


def mixers():
    """Return the AFT mixers of all configs that differ in more than their length and channels."""
    seen, found = set(), {}
    for name, path in configs_of(*TASKS).items():
        text = str(load_config(path).model) if name.startswith('aft') else ''
        if 'aft_mm.AFT' not in text or text in seen:
            continue
        seen.add(text)
        for part, mixer in build_model(path).named_modules():
            if not isinstance(mixer, AFTMixer) or 'cross' in part:
                continue
            sizes = [getattr(mixer, x, None) for x in ('window', 'kernel_size', 'key_function')]
            per_head = getattr(mixer, 'num_heads', None) == mixer.embed_dims
            sizes += [length(mixer) > 500, per_head, len(mixer.grid or ()), mixer.query is None]
            key = type(mixer), mixer.causal, mixer.gate, str(sizes)
            if key not in found or length(mixer) < length(found[key][1]):
                found[key] = f'{name} {part}', mixer
    return dict(found.values())


def run(mixer):
    mixer = copy.deepcopy(mixer).to_empty(device='cpu')
    grid, tokens = mixer.grid or (1024,), mixer.num_prefix_tokens + length(mixer)
    heads = getattr(mixer, 'num_heads', mixer.embed_dims)
    batch = 64 // (mixer.embed_dims // heads) if 'Conv' in type(mixer).__name__ else 2
    shapes = [(max(batch, 1), tokens, channels) for channels in (mixer.embed_dims, heads)]
    for training in (True, False):
        mixer.train(training)
        query, value = (torch.empty(shapes[0], dtype=TYPE, requires_grad=training) for _ in 'qv')
        key = torch.empty(shapes[1], dtype=TYPE, requires_grad=training)
        query = None if mixer.query is None else query
        with torch.set_grad_enabled(training), torch.autocast('cpu', TYPE):
            output = mixer._mix(query, key, value, grid, None)
        if training:
            inputs = [x for x in (query, key, value, *mixer.parameters()) if x is not None]
            torch.autograd.grad(output, inputs, torch.empty_like(output), allow_unused=True)


def test_the_check_runs_every_form_that_default_configs_use(monkeypatch):
    with recorded_forms() as checked:
        for op in OPS:
            for pair in pairs_on_a_device(op):
                selftest.run_kernels(op, *pair, CPU, TYPE, PROCESSORS)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'triton,eager')
    missing, used = set(), set()
    for name, mixer in mixers().items():
        with recorded_forms() as forms:
            run(mixer)
        used |= forms
        missing |= {f'{form[0]} of {name}' for form in forms - checked}
    assert not missing
    assert len(used) > 150  # of about 500 that the check runs


def test_kernels_are_compiled_in_threads_and_not_launched(monkeypatch):
    """A kernel that cannot be compiled stops nothing before it is launched."""
    launchers, threads = [], set()

    class Driver(OfflineDriver):
        def launcher_cls(self, source, metadata):
            threads.add(threading.current_thread())
            launchers.append(metadata.name)
            if metadata.name == 'simple_backward_kernel':
                raise OSError('no compiler')

    monkeypatch.setattr(driver, '_active', Driver(90))
    monkeypatch.setattr(availability, 'machine_reasons', lambda *place: ())
    run = JITFunction.run
    case = simple(5, causal=True)
    with compile_only():
        for _ in range(2):
            selftest.run_kernels('aft_simple', case, 'plain', CPU, TYPE, 1)
    assert sorted(launchers) == [
        'simple_backward_kernel',
        'simple_forward_kernel',
        'simple_forward_kernel',
    ]
    assert threading.main_thread() not in threads and JITFunction.run is run
