"""Dispatch and the public ops: backends, argument checks, autocast, torch.compile, memory."""

import importlib
import importlib.util
import re
import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aft_mm import ops
from aft_mm.ops import __main__ as program
from aft_mm.ops import dispatch, eager, reference, verified
from aft_mm.ops.eager.conv import safe_conv_mean_node
from aft_mm.ops.native import availability as native_availability
from aft_mm.ops.triton import availability as triton_availability

from ..errors import refuses
from ..helpers import each
from .cases import ONE_OF_EACH

EACH = pytest.mark.parametrize('case', ONE_OF_EACH.values(), ids=ONE_OF_EACH)


def call_on(device: str, op='aft_simple', dtype=torch.float32, **options):
    options = {**dict(key_function='softmax', causal=True), **options}
    return op, [torch.empty(1, 1, 1, device=device, dtype=dtype)] * 3, options


def test_environment_variable_chooses_the_backend(monkeypatch):
    assert dispatch.implementation(*call_on('cpu', causal=False))[1] is eager.aft_simple
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'eager')
    assert dispatch.implementation(*call_on('cpu'))[1] is eager.aft_simple
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'reference')
    assert dispatch.implementation(*call_on('cpu'))[1] is reference.aft_simple
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'fast')
    with pytest.raises(ValueError, match="names of cuda, triton, .* reference .*, got 'fast'"):
        dispatch.implementation(*call_on('cpu'))


def test_several_backends_are_tried_in_the_order_given(monkeypatch):
    monkeypatch.setattr(triton_availability, 'machine_reasons', lambda kind, index: ())
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'triton, eager')
    assert dispatch.choose_backend(*call_on('cpu')) == 'triton'
    assert dispatch.choose_backend(*call_on('cpu', causal=False)) == 'eager'
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'eager,triton')
    assert dispatch.choose_backend(*call_on('cpu')) == 'eager'


def test_an_unsupported_backend_gives_reasons(monkeypatch):
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'reference')
    tensor = SimpleNamespace(device=torch.device('mps'))
    with pytest.raises(RuntimeError, match='float64, which the mps device lacks'):
        dispatch.choose_backend('aft_simple', [tensor] * 3, {})


def test_triton_requested_where_it_is_unsupported_is_an_error(monkeypatch):
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'triton')
    with pytest.raises(RuntimeError, match='aft_simple on cpu: .*triton: runs on cuda tensors'):
        ops.aft_simple(Q, Q, Q, causal=True)


REFUSED = {
    'has no kernel': dict(op='aft_local_learned'),
    'has a kernel for aft_simple with causal=True only, got False': dict(causal=False),
    'has a kernel for aft_conv with causal=False only, got True': dict(
        op='aft_conv', global_connectivity=True, grid=(1, 1)
    ),
    'has a kernel for aft_conv on grids of 1 or 2 sizes only, got (1, 1, 1)': dict(
        op='aft_conv', global_connectivity=True, causal=False, grid=(1, 1, 1)
    ),
    'has kernels for float32, float16 and bfloat16, got torch.float64': dict(dtype=torch.float64),
}


@pytest.mark.parametrize('reason', REFUSED)
def test_unsupported_inputs_are_refused(reason, monkeypatch):
    monkeypatch.setattr(triton_availability, 'machine_reasons', lambda kind, index: ())
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'triton')
    assert dispatch.choose_backend(*call_on('cpu')) == 'triton'
    (against,) = dispatch.unsupported_reasons('triton', *call_on('cpu', **REFUSED[reason]))
    assert reason in against


LACKING = {
    'is not installed': (importlib.util, 'find_spec', lambda name: None),
    'runs on NVIDIA devices only': (torch.version, 'hip', '7.0'),
    'finds no CUDA device': (torch.cuda, 'is_available', lambda: False),
    'needs compute capability 8.0, got 7.5': (
        torch.cuda,
        'get_device_capability',
        lambda index: (7, 5),
    ),
    'is refused on compute capability 10.3': (
        torch.cuda,
        'get_device_capability',
        lambda index: (10, 3),
    ),
    'needs Triton 3.6 to 3.8, got 3.5': (triton_availability, 'interpreted', lambda: False),
    'needs Triton 3.6 to 3.8, got 3.10': (triton_availability, 'interpreted', lambda: False),
    'needs a C compiler, got none as gcc or clang': (shutil, 'which', lambda name: None),
    'needs the headers of Python, got no no/Python.h': (
        sysconfig,
        'get_paths',
        lambda: dict(include='no'),
    ),
}


@pytest.fixture
def unqueried_machine():
    triton_availability.ask_machine.cache_clear()
    yield
    triton_availability.ask_machine.cache_clear()


@pytest.mark.parametrize('reason', LACKING)
def test_machines_that_lack_something(reason, monkeypatch, unqueried_machine, tmp_path):
    version = f'{reason.split()[-1]}.1' if reason.startswith('needs Triton') else '3.6.1'
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: object())
    monkeypatch.setattr(
        importlib, 'import_module', lambda name: SimpleNamespace(__version__=version)
    )
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda index: (9, 0))
    monkeypatch.delenv('CC', raising=False)
    monkeypatch.setattr(shutil, 'which', lambda name: name)
    (tmp_path / 'Python.h').touch()
    monkeypatch.setattr(sysconfig, 'get_paths', lambda: dict(include=tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(*LACKING[reason])
        assert triton_availability.machine_reasons('cuda', 0) == (reason,)
    triton_availability.ask_machine.cache_clear()
    assert version != '3.6.1' or triton_availability.machine_reasons('cuda', 0) == ()


H100, A100 = (9, 0), (8, 0)


@pytest.mark.parametrize(
    'capability, version, op, dtype, reasons',
    [
        (H100, '3.6.0', 'aft_simple', torch.float32, []),
        (H100, '3.6.1', 'aft_conv_step', torch.bfloat16, []),
        (H100, '3.6.0', 'aft_local', torch.bfloat16, []),
        (H100, '3.6.0', 'aft_local', torch.float16, ['not verified on capability 9.0 in float16']),
        (A100, '3.6.0', 'aft_simple', torch.float32, ['not verified on capability 8.0 in float32']),
        (H100, '3.8.0', 'aft_simple', torch.float32, ['not verified with Triton 3.8']),
    ],
)
def test_kernels_are_the_default_where_they_were_verified(
    capability, version, op, dtype, reasons, monkeypatch
):
    monkeypatch.setattr(
        importlib, 'import_module', lambda name: SimpleNamespace(__version__=version)
    )
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(verified, 'ask_capability', lambda index: capability)
    tensors = [torch.empty(1, 1, 1, dtype=dtype, device='meta')] * 3
    device = SimpleNamespace(type='cuda', index=0)
    value = SimpleNamespace(dtype=dtype, device=device, shape=(1, 1, 1))
    found = triton_availability.reasons_on_request_only(op, [*tensors[:2], value])
    assert found == [f'{reason}; AFT_MM_BACKEND=triton uses it' for reason in reasons]


def test_heads_of_several_channels_are_slower_on_a_gpu_and_need_a_request(monkeypatch):
    monkeypatch.setattr(triton_availability, 'machine_reasons', lambda kind, index: ())
    monkeypatch.setattr(triton_availability, 'default_reasons', lambda *call: ())
    query, key = torch.empty(1, 1, 4), torch.empty(1, 1, 2)
    options = dict(global_connectivity=True, causal=False, grid=(1,))
    call = 'aft_conv', [query, key, query], options
    assert dispatch.unsupported_reasons('triton', *call) == [
        'slower than eager for heads of several channels; AFT_MM_BACKEND=triton uses it'
    ]
    assert not dispatch.unsupported_reasons('triton', 'aft_conv', [query] * 3, options)
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'triton,eager')
    assert dispatch.choose_backend(*call) == 'triton'


def test_a_machine_is_queried_once(monkeypatch, unqueried_machine):
    asked = []
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: bool(asked.append(1)))
    answers = {triton_availability.machine_reasons('cuda', 0) for _ in range(3)}
    assert answers == {('finds no CUDA device',)} and len(asked) == 1


def test_triton_interpreted_runs_on_the_cpu(monkeypatch):
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    assert triton_availability.machine_reasons('cuda', 0) == (
        "runs on cpu tensors only in Triton's interpreter",
    )


@pytest.mark.parametrize('asked', [None, 'triton', 'reference'])
def test_table_of_backends(asked, monkeypatch, capsys):
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, asked or '')
    program.main([])
    output = capsys.readouterr().out
    for op in dispatch.OPS:
        assert f'{op} ' in output
    assert ('reference cannot run any op or step on cpu' in output) == (asked != 'reference')
    for backend in ('cuda', 'triton'):
        assert f'{backend} cannot run any op or step on cpu: runs on cuda tensors' in output
    ops = 'aft_local_learned', 'aft_decay', 'linear_attention'
    without = ', '.join((*ops, *(f'{op}_step' for op in ops)))
    assert f'{without} on cpu: has no kernel' in output
    assert 'aft_local (any options)' in output and 'a grid of 1 or 2 sizes)' in output
    rows = [line.split()[2:] for line in output.splitlines()[1:3]]  # aft_simple, aft_full
    loops = 'available' if isinstance(native_availability.find_library(), Path) else 'no'
    expected = [['no', 'no', loops, 'available', 'no'], ['no', 'no', 'no', 'available', 'no']]
    if asked == 'reference':
        expected[0][4] = expected[1][4] = 'used'
    elif asked is None:
        expected[0][2 if loops == 'available' else 3] = expected[1][3] = 'used'
    assert rows == expected


def test_table_of_backends_for_an_unknown_name(monkeypatch):
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, 'Triton')
    with pytest.raises(SystemExit, match='^Error: AFT_MM_BACKEND must be names of cuda, triton'):
        program.main([])


Q = torch.randn(2, 6, 4)
U = torch.randn(6, 3)
W = torch.randn(4, 3, 3)
BOOLS = torch.ones(6, 6, dtype=torch.bool)
TOKENS = dict(query=Q, key=Q, value=Q)
FACTORS = dict(pos_u=U, pos_v=U, window=2)
GOOD = dict(
    aft_simple=TOKENS,
    aft_full=dict(TOKENS, position_bias=torch.randn(6, 6)),
    aft_conv=dict(TOKENS, weight=W, grid=(2, 3)),
    aft_local=dict(TOKENS, **FACTORS),
    aft_local_learned=dict(TOKENS, **FACTORS),
    aft_local_hard=TOKENS,
)
# Arguments other than the good ones, and the message.
BAD = dict(
    aft_simple=[
        (dict(query=None), "exactly for gate='none', got no query with gate='sigmoid'"),
        (dict(gate='none'), "got a query with gate='none'"),
        (dict(key_function='elu'), "key_function must be one of softmax, relu, relu2, got 'elu'"),
        (dict(key_function='relu2'), "gate must be 'relu' for key_function='relu2', got 'sigmoid'"),
        (dict(key=Q[..., :3]), 'key must have the 4 channels of value, got 3'),
        (dict(query=Q[:1]), 'query must be [B, T, D] with the B and D of value'),
        (dict(query=Q[..., :3]), 'query must be [B, T, D] with the B and D of value'),
        (dict(query=Q[:, :0]), 'and T of 1 or more, got query [2, 0, 4] and value [2, 6, 4]'),
        (dict(query=Q[:, :5], causal=True), 'must have the same length here, got T=5 and S=6'),
        (dict(key=Q[0], value=Q[0]), 'key and value must be [B, S, channels] with the same B'),
        (dict(key=Q[:, :0], value=Q[:, :0]), '1 or more, got [2, 0, 4] and [2, 0, 4]'),
        (dict(key_mask=BOOLS[:2, :5]), 'True for tokens to keep, got torch.bool [2, 5]'),
        (dict(key_mask=U), 'key_mask must be bool [2, 6] with True for tokens to keep, got'),
    ],
    aft_full=[
        (dict(position_bias=U), 'position_bias must be [T, S] = [6, 6] or [B, T, S] = [2, 6, 6]'),
        (dict(position_bias=torch.randn(4, 6, 6)), '[2, 6, 6] with num_heads=None, got [4, 6, 6]'),
        (dict(query=None, gate='none', position_bias=torch.randn(0, 6)), 'None, got [0, 6]'),
        (dict(num_heads=2), 'must be [h, T, S] = [2, 6, 6] or [B, h, T, S] = [2, 2, 6, 6] with'),
        (dict(num_heads=3), 'num_heads must be an int that divides embed_dims=4, got 3'),
        (dict(pair_mask=BOOLS), 'pair_mask must be bool [2, 6, 6] with True for pairs to keep'),
    ],
    aft_conv=[
        (dict(grid=(2, 4)), 'grid (2, 4) holds 8 tokens, but the sequence has 6'),
        (dict(grid=(6,)), 'kernel of 1 dimensions for grid (6,), got kernel (3, 3)'),
        (dict(grid=6), 'grid must be 1 or 2 or 3 ints, 1 or larger, got 6'),
        (dict(grid=(1, 1, 2, 3)), 'grid must be 1 or 2 or 3 ints, 1 or larger, got (1, 1, 2, 3)'),
        (dict(weight=W[:, :2]), 'weight must have odd kernel sizes, got (2, 3)'),
        (dict(key=Q[..., :3], weight=W[:3]), 'the 3 heads of weight must equal the channels of'),
    ],
    aft_local=[
        (dict(window=2.5), 'window must be an int, 0 or larger, got 2.5'),
        (dict(window=-1), 'window must be an int, 0 or larger, got -1'),
        (dict(window=(2, 2)), 'window must be an int, 0 or larger, got (2, 2)'),
        (dict(pos_u=U[:5]), "pos_u and pos_v must be [6, d'] and [6, d'], got [5, 3] and [6, 3]"),
        (dict(pos_v=None, grid=(2, 3)), 'pos_v must be given for a grid of 2 dimensions, got None'),
        (dict(pos_v=None, window=0), 'window must be 1 or larger without pos_v, got 0'),
        (dict(pos_v=None, window=3), 'must be [6, 5], a column per offset of the window 3 with'),
    ],
    aft_local_learned=[
        (dict(pos_v=None, causal=True), 'must be [6, 2], a column per offset of the window 2'),
        (dict(window=(-1, 2), grid=(2, 3)), 'window must be an int or 2 ints, 0 or larger, got'),
    ],
    aft_local_hard=[
        (dict(window=0), 'window must be an int, 1 or larger, got 0'),
        (dict(window=(3, 2), grid=(2, 3)), 'even in both dimensions of a grid (H, W), got (3, 2)'),
    ],
)


@each('op, wrong, message', [(op, *row) for op, rows in BAD.items() for row in rows])
def test_bad_arguments_give_a_one_line_error(op, wrong, message):
    refuses(re.escape(message), getattr(ops, op), **{**GOOD[op], **wrong})


@EACH
def test_an_empty_batch(case):
    leaves = case.inputs(batch=0, dtype=torch.bfloat16)
    output = case(*leaves)
    assert output.shape == leaves[0].shape and output.dtype == torch.bfloat16
    for leaf, gradient in zip(leaves, torch.autograd.grad(output.sum(), leaves), strict=True):
        assert gradient.shape == leaf.shape and (gradient == 0).all()


def test_an_empty_batch_without_a_query_has_the_rows_of_the_bias():
    empty = torch.empty(0, 5, 4)
    assert ops.aft_full(None, empty, empty, torch.randn(7, 5), gate='none').shape == (0, 7, 4)


@EACH
def test_autocast_does_not_reach_the_sums(case):
    tensors = [part.detach() for part in case.inputs(dtype=torch.float32)]
    with torch.autocast('cpu', dtype=torch.bfloat16):
        inside = case(*tensors)
    assert inside.dtype == torch.float32 and torch.equal(inside, case(*tensors))


class LargestTensor(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, torch.Tensor):
                self.largest = max(self.largest, part.numel())
        return result


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('key_scale', [1, 100], ids=['fast', 'safe'])
@pytest.mark.parametrize('op', ['aft_simple', 'aft_local', 'free', 'aft_conv', 'aft_local_hard'])
def test_memory_grows_with_tokens_not_their_square(op, key_scale, causal):
    tokens, dims, window, rank = 4096, 4, 8, 2
    query, value, key = torch.randn(3, 1, tokens, dims).unbind()
    bias = {
        'aft_local': [torch.randn(2, tokens, rank, requires_grad=True)],
        'free': [torch.randn(tokens, window if causal else 2 * window - 1, requires_grad=True)],
        'aft_conv': [torch.randn(dims, 2 * window - 1, requires_grad=True)],
    }.get(op, [])
    bias = [*bias[0].unbind()] if op == 'aft_local' else bias
    options = {'aft_conv': dict(grid=(tokens,)), 'aft_simple': {}}.get(op, dict(window=window))
    with LargestTensor() as recorder:
        output = getattr(ops, 'aft_local' if op == 'free' else op)(
            query, (key * key_scale).requires_grad_(), value, *bias, causal=causal, **options
        )
        output.sum().backward()
    # Tiles are 32 wide; [T, T] would be 4096 · T.
    assert recorder.largest <= 3 * 32 * tokens


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('global_connectivity', [False, True])
def test_opcheck_of_safe_convolution(causal, global_connectivity):
    shapes = (2, 12, 2), (2, 12, 6), (2, 3, 3)
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    torch.library.opcheck(safe_conv_mean_node, (*tensors, (3, 4), global_connectivity, causal))


def test_safe_convolution_saves_no_more_for_a_larger_kernel():
    """Bytes that autograd keeps on keys that need the exact form."""

    def saved_bytes(kernel: int) -> int:
        sizes = {}
        query, value = torch.randn(2, 1, 400, 4, requires_grad=True).unbind()
        key = (300 * torch.randn(1, 400, 4)).requires_grad_()
        weight = torch.randn(4, kernel, kernel, requires_grad=True)

        def pack(tensor):
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            ops.aft_conv(query, key, value, weight, grid=(20, 20), global_connectivity=False)
        return sum(sizes.values())

    assert saved_bytes(13) < 1.5 * saved_bytes(3)
