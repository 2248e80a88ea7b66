"""Generate Inductor's Triton source for a CUDA device on a machine without one.

Tensors are fake, the device is mocked, and the source is not compiled.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._triton import has_triton

# What Inductor reads of an H100.
PROPERTIES = SimpleNamespace(
    name='NVIDIA H100',
    type='cuda',
    index=0,
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
)
DEVICE = {
    'torch.cuda.is_available': lambda: True,
    'torch.cuda.device_count': lambda: 1,
    'torch.cuda.current_device': lambda: 0,
    'torch.cuda._lazy_init': lambda: None,
    'torch.cuda.is_current_stream_capturing': lambda: False,  # asked since torch 2.14
    'torch.cuda._get_device_properties': lambda *device: PROPERTIES,
    'torch.cuda.get_device_capability': lambda *device: (9, 0),
    'torch._subclasses.fake_tensor.init_gpu_context': lambda device: None,
}


@contextmanager
def pretended_device() -> Iterator[FakeTensorMode]:
    from triton import runtime
    from triton.backends.compiler import GPUTarget

    target = GPUTarget('cuda', 90, 32)
    driver = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    with ExitStack() as stack:
        for name, answer in DEVICE.items():
            stack.enter_context(mock.patch(name, answer, create=True))
        stack.enter_context(mock.patch.object(runtime.driver, '_active', driver))
        # Clear cached properties of this machine before, and of the fake device afterwards.
        for answer in (has_triton, DeviceProperties.create):
            answer.cache_clear()
            stack.callback(answer.cache_clear)
        yield stack.enter_context(FakeTensorMode())


def source_of(
    function: Callable[..., Sequence[torch.Tensor]], *shapes: Sequence[int], dtype: torch.dtype
) -> str:
    with FakeTensorMode():
        # Autograd needs the streams of a device, so gradients are traced on the CPU and then moved.
        traced = make_fx(function)(*(torch.empty(shape, dtype=dtype) for shape in shapes))
    for node in traced.graph.nodes:
        if 'device' in node.kwargs:
            node.kwargs = dict(node.kwargs, device=torch.device('cuda', 0))
    traced.recompile()
    with pretended_device() as mode, torch.no_grad():
        for name, constant in list(traced.named_buffers()):
            moved = torch.empty(constant.shape, dtype=constant.dtype, device='cuda')
            setattr(traced, name, moved)
        inputs = [torch.empty(shape, device='cuda', dtype=dtype) for shape in shapes]
        # torch.compile replaces operations in place, too. functionalize takes those of ATen only.
        targets = [
            x.target for x in traced.graph.nodes if isinstance(x.target, torch._ops.OpOverload)
        ]
        if not any(x.namespace == 'aft_mm' and x._schema.is_mutable for x in targets):
            traced = torch.func.functionalize(traced, remove='mutations')
        graph = make_fx(traced, decomposition_table=select_decomp_table())(*inputs)
        lowering = GraphLowering(graph, example_inputs=inputs)
        with (
            V.set_graph_handler(lowering),
            V.set_fake_mode(mode),
            V.set_debug_handler(DebugContext()),
        ):
            lowering.run(*inputs)
            return lowering.codegen()[0].value
