"""AFT-full with a bias per sample or head and a mask of pairs."""

import pytest
import torch

from aft_mm import ops
from aft_mm.ops.eager import full_batched

from ..helpers import each
from .cases import CASES, PAIR_CASES, TOLERANCE, randn, run_with_gradients
from .test_backends import assert_close, oracle

B, T, S, D = 3, 5, 7, 6
EVERY = pytest.mark.parametrize('case', PAIR_CASES, ids=lambda case: case.name)


def test_each_sample_and_head_is_a_call_of_its_own():
    """Its mask is the −inf of a bias [T, S]."""
    query, key, value, bias = randn(B, T, D), randn(B, S, D), randn(B, S, D), randn(B, 2, T, S)
    mask = torch.rand(B, T, S) < 0.7
    got = ops.aft_full(query, key, value, bias, num_heads=2, pair_mask=mask)
    hidden = bias.masked_fill(~mask.unsqueeze(1), -torch.inf)
    for sample in range(B):
        for head, channels in enumerate((slice(0, 3), slice(3, 6))):
            parts = [x[sample : sample + 1, :, channels] for x in (query, key, value)]
            expected = ops.aft_full(*parts, hidden[sample, head])
            torch.testing.assert_close(got[sample : sample + 1, :, channels], expected)


@each('key_scale, bias_scale', [(1, 1e4), (1e4, 1), (1e4, 1e4), (30, 30)])
@each('case', [c for c in CASES if c.op in ('aft_full', 'aft_full_batched')])
def test_biases_and_keys_of_ten_thousand(case, key_scale, bias_scale, monkeypatch):
    tensors = [x.detach() for x in case.inputs(dtype=torch.float32, bias_scale=bias_scale)]
    tensors[1] *= key_scale
    expected = oracle(case, tensors, monkeypatch)
    assert_close(run_with_gradients(case, tensors), expected, TOLERANCE[torch.float32], 1.0)
    mask = torch.rand(2, tensors[1].shape[1]) < 0.6
    expected = oracle(case, tensors, monkeypatch, key_mask=mask)
    got = run_with_gradients(case, tensors, key_mask=mask)
    assert_close(got, expected, TOLERANCE[torch.float32], 1.0)
    # The largest w of a row may be that of a key of −∞.
    tensors[1][mask] = -torch.inf
    expected = oracle(case, tensors, monkeypatch)
    assert_close(run_with_gradients(case, tensors), expected, TOLERANCE[torch.float32], 1.0)


@EVERY
def test_chunks_change_nothing(case, monkeypatch):
    tensors = [x.detach() for x in case.inputs(batch=5)]
    for scale in (1, 1e4):
        tensors[1] = tensors[1] * scale
        monkeypatch.undo()
        expected = run_with_gradients(case, tensors)
        monkeypatch.setattr(full_batched, 'CHUNK', 1)
        monkeypatch.setattr(full_batched, 'EXACT_CHUNK', 1)
        torch.testing.assert_close(run_with_gradients(case, tensors), expected)


@EVERY
def test_strided_inputs(case):
    tensors = [x.detach() for x in case.inputs(dtype=torch.float32)]
    expected = run_with_gradients(case, tensors)
    strided = [x.mT.contiguous().mT for x in tensors]
    torch.testing.assert_close(run_with_gradients(case, strided), expected)


@pytest.mark.parametrize('key_scale', [1, 1e4])
@pytest.mark.parametrize('causal', [False, True])
def test_hidden_pairs_may_be_nan(causal, key_scale, monkeypatch):
    """So may a key that no row sees; a row without keys is 0, and gradients are finite."""
    mask = torch.rand(B, S, S) < 0.6
    mask[0, 2], mask[1, :, 3], mask[2] = False, False, False
    tensors = [torch.randn(B, S, D), key_scale * torch.randn(B, S, D), torch.randn(B, S, D)]
    tensors.append(torch.randn(B, S, S))

    def run(*tensors):
        return ops.aft_full(*tensors, pair_mask=mask, causal=causal)

    poisoned = [x.clone() for x in tensors]
    poisoned[3][~mask] = torch.nan
    for x in poisoned[1:3]:
        x[1, 3], x[2] = torch.nan, torch.inf
    with monkeypatch.context() as patch:
        patch.setenv('AFT_MM_BACKEND', 'reference')
        expected = run_with_gradients(run, [x.double() for x in tensors])
    got = run_with_gradients(run, poisoned)
    assert_close(got, expected, TOLERANCE[torch.float32], 1.0)
    assert (got[0][0, 2] == 0).all() and (got[0][2] == 0).all()
    assert (got[4][~mask] == 0).all() and (got[2][1, 3] == 0).all()


def test_a_nan_reaches_only_the_rows_that_see_it():
    mask = torch.rand(B, T, S) < 0.6
    tensors = [torch.randn(B, T, D), torch.randn(B, S, D), torch.randn(B, S, D)]
    bias = torch.randn(B, T, S)
    before = ops.aft_full(*tensors, bias, pair_mask=mask)
    for which in (1, 2):
        changed = [x.clone() for x in tensors]
        changed[which][0, 4, 0] = torch.nan
        got = ops.aft_full(*changed, bias, pair_mask=mask)
        is_changed = torch.zeros_like(got, dtype=torch.bool)
        is_changed[0, :, 0] = mask[0, :, 4]
        assert got[is_changed].isnan().all()
        torch.testing.assert_close(got[~is_changed], before[~is_changed])


@pytest.mark.parametrize('key_scale', [1, 1e4])
def test_no_temporary_grows_with_the_batch_squared_length_and_channels(key_scale):
    from .test_dispatch import LargestTensor

    batch, tokens, dims = 16, 128, 64
    inputs = [x.requires_grad_() for x in torch.randn(3, batch, tokens, dims).unbind()]
    bias = torch.randn(batch, tokens, tokens, requires_grad=True)
    with LargestTensor() as recorder:
        output = ops.aft_full(inputs[0], key_scale * inputs[1], inputs[2], bias, causal=True)
        output.sum().backward()
    assert recorder.largest <= 2 * full_batched.EXACT_CHUNK < batch * tokens**2 * dims


@pytest.mark.slow
@pytest.mark.parametrize(
    'shape, masked', [((2, T, S), False), ((B, T, S), True), ((B, 2, T, S), False)], ids=str
)
def test_exported_graph_is_valid_for_other_inputs(masked, shape):
    heads = None if shape == (B, T, S) else 2

    class Op(torch.nn.Module):
        def forward(self, key, value, bias, mask):
            options = dict(pair_mask=mask) if masked else {}
            return ops.aft_full(None, key, value, bias, gate='none', num_heads=heads, **options)

    mask = torch.rand(B, T, S) < 0.7
    inputs = torch.randn(B, S, D), torch.randn(B, S, D), torch.randn(*shape), mask
    with ops.record_paths() as paths:
        Op()(*inputs)
    per_sample = shape[0] == B
    assert paths == [not masked and not per_sample]
    with ops.replay_paths(paths), torch.no_grad():
        program = torch.export.export(Op(), inputs, strict=False)
    names = {str(node.target) for node in program.graph.nodes}
    assert not [name for name in names if 'aft_mm' in name or 'cond' in name]
    other = [300 * inputs[0], inputs[1], (1e4 if per_sample else 1) * inputs[2], mask]
    torch.testing.assert_close(program.module()(*other), Op()(*other))
    runtime = pytest.importorskip('onnxruntime', reason='onnxruntime runs the exported graph')
    pytest.importorskip('onnxscript', reason='onnxscript exports the graph')
    graph = torch.onnx.export(program, dynamo=True, verbose=False)
    session = runtime.InferenceSession(graph.model_proto.SerializeToString())
    feeds = {x.name: y.numpy() for x, y in zip(session.get_inputs(), other, strict=False)}
    (found,) = session.run(None, feeds)
    torch.testing.assert_close(torch.from_numpy(found), Op()(*other), rtol=1e-5, atol=1e-6)


def test_kernels_and_loops_decline():
    bias, x = torch.randn(2, T, T), torch.randn(B, T, D)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('AFT_MM_BACKEND', 'native')
        with pytest.raises(
            RuntimeError, match='native: has a loop for aft_full with a bias per sample'
        ):
            ops.aft_full(x, x, x, bias, num_heads=2)


@pytest.mark.parametrize('shape', [(7, 7), (2, 7, 7)])
def test_gradients_with_a_graph_inside_of_autocast_are_not_rounded(shape):
    key, value = (torch.randn(2, 7, 4, requires_grad=True) for _ in range(2))
    output = ops.aft_full(None, key, value, torch.randn(shape), gate='none')
    cotangent = torch.randn_like(output)
    expected = torch.autograd.grad(output, key, cotangent, create_graph=True)[0]
    with torch.autocast('cpu', torch.bfloat16):
        got = torch.autograd.grad(output, key, cotangent, create_graph=True)[0]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
