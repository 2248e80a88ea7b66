"""Graphs of AFT-conv and of windows, with recorded paths, equal the oracle in every runtime."""

from itertools import product

import pytest
import torch
from torch import nn

from aft_mm import ops
from aft_mm.ops import reference

from ..helpers import nightly
from .runtimes import MISSING, open_onnx, open_openvino


class Op(nn.Module):
    """AFT-conv without global connectivity, whose form depends on the keys only."""

    def forward(self, key, value, weight):
        options = dict(grid=(3, 5), global_connectivity=False, gate='none')
        return ops.aft_conv(None, key, value, weight, **options)


def test_recorded_paths_take_kernels_larger_than_the_grid():
    query, value = torch.randn(2, 2, 20, 6)
    key, weight = torch.randn(2, 20, 3), torch.randn(3, 25, 25)
    options = dict(grid=(4, 5), global_connectivity=False)
    with ops.record_paths() as paths:
        mixed = ops.aft_conv(query, key, value, weight, **options)
    assert paths == [False]
    torch.testing.assert_close(mixed, ops.aft_conv(query, key, value, weight, **options))


def test_the_graph_is_valid_for_keys_unlike_the_example():
    small, value, weight = torch.randn(2, 15, 2), torch.randn(2, 15, 4), torch.randn(2, 3, 3)
    with ops.record_paths() as paths:
        Op()(small, value, weight)
    assert paths == [False]
    with ops.replay_paths(paths), torch.no_grad():
        program = torch.export.export(Op(), (small, value, weight), strict=False)
    names = {str(node.target) for node in program.graph.nodes}
    assert not [name for name in names if 'aft_mm' in name or 'cond' in name]
    large = 300 * small
    expected = Op()(large, value, weight)
    torch.testing.assert_close(program.module()(large, value, weight), expected)


class Conv(nn.Module):
    def __init__(self, weight, **options):
        super().__init__()
        self.weight, self.options = weight, options

    def forward(self, query, key, value):
        return ops.aft_conv(query, key, value, self.weight, **self.options)


RUNTIME_CASES = {
    'image': ((7, 13), (11, 11), 0.5, {}),
    'additive': ((7, 13), (3, 5), 4.0, {}),
    'line': ((63,), (5,), 0.5, {}),
    'volume': ((3, 2, 5), (3, 1, 5), 0.5, {}),
    'column': ((7, 1), (3, 3), 0.5, {}),
    'causal': ((7, 5), (3, 5), 0.5, dict(causal=True)),
}


FEW = ('additive', 'onnxruntime'), ('causal', 'openvino'), ('column', 'torch')


@pytest.mark.parametrize(
    'case, runtime',
    nightly(
        product(RUNTIME_CASES, ['torch', 'openvino', 'onnxruntime']),
        lambda case, runtime: case != 'image' and (case, runtime) not in FEW,
    ),
)
def test_graphs_of_all_runtimes_equal_the_oracle(case, runtime, tmp_path):
    grid, kernel, scale, options = RUNTIME_CASES[case]
    tokens = torch.Size(grid).numel()
    query, key, value = (torch.randn(2, tokens, channels) for channels in (6, 3, 6))
    weight = scale * torch.randn(3, *kernel).clamp(-2, 2)
    options = {'causal': False, 'grid': grid, **options}
    shared = dict(global_connectivity=True, key_mask=None, gate='sigmoid')
    op = Conv(weight, **options)
    with torch.no_grad():
        with ops.record_paths() as paths:
            op(query, key, value)
        if case == 'causal':
            paths[:] = [True]  # the fast path, which keys of the example allow
        with ops.replay_paths(paths, runtime):
            program = torch.export.export(op, (query, key, value), strict=False)
    graphs = [program.module()]
    if runtime != 'torch' and not MISSING:
        graphs.append(in_runtime(program, tmp_path / 'op.onnx', runtime))
    for factor in (1.0,) if case == 'causal' else (1.0, 300.0, 1e4):
        inputs = query, factor * key, value
        doubles = [x.double() for x in (*inputs, weight)]
        expected = reference.aft_conv(*doubles, **shared, **options).float()
        for graph in graphs:
            torch.testing.assert_close(graph(*inputs), expected, atol=2e-5, rtol=1e-4)


def in_runtime(program, path, runtime):
    names = ['query', 'key', 'value']
    written = torch.onnx.export(program, dynamo=True, opset_version=18, input_names=names)
    written.save(str(path), external_data=False)
    if runtime == 'openvino':
        compiled = open_openvino(path)

        def run(arrays):
            return compiled(arrays)[0].copy()
    else:
        session = open_onnx(path)

        def run(arrays):
            return session.run(None, arrays)[0]

    def call(*inputs):
        return torch.from_numpy(run({n: x.numpy() for n, x in zip(names, inputs, strict=True)}))

    return call


def test_an_unknown_runtime_is_refused():
    for words, message in (
        (('tflite',), "runtime must be one of .*, got 'tflite'"),
        (
            ('torch', True),
            "runtime must be 'onnxruntime' or 'openvino' for loops=True, got 'torch'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            with ops.replay_paths([], *words):
                pass


class Window(nn.Module):
    def forward(self, key, value):
        options = dict(window=(4, 6), grid=tuple(key.shape[1:3]), gate='none')
        return ops.aft_local_hard(None, key.flatten(1, 2), value.flatten(1, 2), **options)


def test_a_window_fits_every_grid_of_an_open_graph():
    example = torch.randn(2, 1, 5, 7, 3).unbind()
    with ops.record_paths() as paths:
        Window()(*example)
    sides = dict.fromkeys((1, 2), torch.export.Dim.AUTO)
    with ops.replay_paths(paths), torch.no_grad():
        program = torch.export.export(
            Window(), example, dynamic_shapes=(sides, sides), strict=False
        ).module()
    for grid in ((5, 7), (3, 2), (9, 4), (2, 12)):
        key, value = torch.randn(2, 1, *grid, 3)
        torch.testing.assert_close(program(300 * key, value), Window()(300 * key, value))


def test_paths_of_another_model_are_refused():
    key, value, weight = torch.randn(2, 15, 2), torch.randn(2, 15, 4), torch.randn(2, 3, 3)
    expected = Op()(key, value, weight)
    with pytest.raises(RuntimeError, match='got 2 for a run that chose 1'):
        with ops.replay_paths([True, True]):
            Op()(key, value, weight)
    torch.testing.assert_close(Op()(key, value, weight), expected)
