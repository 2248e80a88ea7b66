"""What tools/benchmarks/bounds.py counts, and that docs/benchmarks.md says what it says."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

TOOLS = Path(__file__).parents[1] / 'tools' / 'benchmarks'
sys.path.insert(0, str(TOOLS))

import bounds  # noqa: E402
import model_costs  # noqa: E402
from bounds import GPUS, compare, kernel_seconds  # noqa: E402
from model_costs import Kernel, image_kernels, trace  # noqa: E402

AFT, DEIT = (f'image_classification/{name}' for name in bounds.IMAGES['small h384 k11'])


@pytest.fixture(scope='module')
def kernels():
    """The traces that several tests look at, each made once."""
    made = {}

    def get(name, size):
        if (name, size) not in made:
            made[name, size] = image_kernels(name, size, bounds.BATCH, torch.bfloat16)
        return made[name, size]

    return get


def total(kernels, kind, what='operations'):
    return sum(getattr(kernel, what) for kernel in kernels if kernel.kind == kind)


@pytest.fixture(scope='module')
def rows():
    """All counts of the page."""
    return bounds.count_all(GPUS['h200'], 'bfloat16')


def test_the_page_is_up_to_date_and_one_that_is_not_is_refused(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, 'count_all', lambda *args: rows)
    bounds.main(['--check'])
    text, page = bounds.DOCS.read_text(), tmp_path / 'benchmarks.md'
    monkeypatch.setattr(bounds, 'DOCS', page)
    for there, problem in [
        ('| small h384 k11 | 224 | 8', 'are not those of the configs'),
        ('<!-- bounds: ops -->', 'must hold the tables decoders, images, ops of bounds, each once'),
    ]:
        assert there in text
        page.write_text(text.replace(there, there.replace('8', '9').replace('bounds', '')))
        with pytest.raises(bounds.UserError, match=problem):
            bounds.main(['--check'])
    page.write_text(text.replace('| small h384 k11 | 224 | 8', '| small h384 k11 | 224 | 9'))
    bounds.main([])
    assert page.read_text() == text


def test_kernels_of_a_layer_are_those_of_a_hand_count():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 16)

        def forward(self, x):
            x = self.linear(x).view(2, 3, 4, 4).transpose(1, 2)
            return F.gelu(x + x.new_empty(1).expand(2, 4, 3, 4))

    with torch.device('meta'):
        layer, x = Layer().to(torch.bfloat16), torch.empty(2, 3, 8, dtype=torch.bfloat16)
    product, add, gelu = trace(layer, layer, x)
    assert product == Kernel('product', 2 * 6 * 8 * 16, 2 * (6 * 8 + 8 * 16 + 16 + 6 * 16))
    # A number that is expanded is read once.
    assert add == Kernel('element-wise', 0, 2 * (96 + 1 + 96))
    assert gelu == Kernel('element-wise', 0, 2 * (96 + 96))


@pytest.mark.parametrize('causal', [False, True])
def test_attention_is_one_kernel_with_filled_tiles_and_five_products_backward(causal):
    class Attention(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, is_causal=causal)

    x = torch.empty(2, 3, 130, 8, dtype=torch.bfloat16, device='meta', requires_grad=True)
    forward, backward = (k for k in trace(Attention(), Attention(), x) if k.kind == 'attention')
    pair, size = 2 * 2 * 2 * 3 * 8 / (2 if causal else 1), x.nbytes
    assert forward == Kernel('attention', pair * 130**2, 4 * size, pair * 256**2)
    assert backward == Kernel(
        'attention', 2.5 * pair * 130**2, (2 * 3 + 1) * size, 2.5 * pair * 256**2
    )


@pytest.mark.parametrize('training', [False, True])
def test_operations_of_a_model_are_those_that_torch_counts_when_it_runs(training):
    name = 'language_modeling/transformer-mini_1xb16-6e_enwik8-t256'
    model = model_costs.read_model(name, torch.float32, grid=(24,)).to_empty(device='cpu')
    x = torch.randn(2, 24, model.embed_dims, requires_grad=training)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        hidden = model.run_blocks(x)
        if training:
            hidden.sum().backward()
    found = trace(
        model.to('meta'), model.run_blocks, x.detach().to('meta').requires_grad_(training)
    )
    attention = total(found, 'attention')
    # The counter has two products forward and four backward, whole; flash attention two and five,
    # and of each the half that is not masked.
    counted = 2 * attention * (6 / 7 if training else 1)
    assert total(found, 'product') + counted == counter.get_total_flops()


@pytest.mark.parametrize('size, by_hand', [(224, 1.09), (512, 1.44)])
def test_operations_alone_give_one_plus_t_over_six_d(size, by_hand, kernels):
    row = compare(kernels(AFT, size), kernels(DEIT, size), GPUS['h200'], 'bfloat16')
    assert row['by_operations'] == pytest.approx(by_hand, abs=0.005)
    assert row['by_operations'] == pytest.approx(1 + (size // 16) ** 2 / (6 * 384), abs=0.01)


def test_the_count_by_hand_comes_out_with_its_own_assumptions(kernels):
    """55 µs of element-wise passes and 55 µs of flash attention at 512 px: 1.36."""
    gpu, aft, deit = GPUS['h200'], kernels(AFT, 512), kernels(DEIT, 512)
    products = sum(kernel_seconds(k, gpu, 'bfloat16') for k in aft if k.kind == 'product')
    rest = products / bounds.BATCH * 1e6 + 55
    assert (rest + 55) / rest == pytest.approx(1.36, abs=0.01)
    # Where the counts differ from it: 40 µs, and 70 with the tiles that 1,025 tokens fill.
    moved = total(aft, 'element-wise', 'bytes') / bounds.BATCH / (0.9 * gpu.memory)
    attended = total(deit, 'attention', 'computed') / bounds.BATCH / (0.35 * gpu.bfloat16)
    assert 39e-6 < moved < 41e-6 and 69e-6 < attended < 71.5e-6
    row = compare(kernels(AFT, 224), kernels(DEIT, 224), gpu, 'bfloat16')
    assert row['free'] == pytest.approx(1.15, abs=0.015)


def test_with_one_rate_for_all_and_no_bytes_the_bound_is_that_of_the_operations(
    kernels, monkeypatch
):
    monkeypatch.setattr(bounds, 'ATTAINED', dict(memory=1.0, product=1.0, attention=1.0))
    gpu = replace(GPUS['h200'], memory=math.inf, launch=0.0)
    deit = [replace(kernel, computed=0.0) for kernel in kernels(DEIT, 224)]
    row = compare(kernels(AFT, 224), deit, gpu, 'bfloat16')
    assert row['free'] == pytest.approx(row['by_operations']) == pytest.approx(row['one_pass'])


def test_the_aim_is_a_share_of_the_bound_and_says_what_the_mixing_may_take():
    gpu = replace(GPUS['h200'], memory=1e9, bfloat16=1e12, launch=0.0)
    # 10 ms beside 4 ms of mixing, against 10 ms and 18.
    aft = [Kernel('product', 4.5e9, 0), Kernel('mixing', 0, 3_600_000)]
    rival = [Kernel('product', 4.5e9, 0), Kernel('attention', 6.3e9, 0)]
    row = compare(aft, rival, gpu, 'bfloat16')
    assert row['free'] == pytest.approx(2.8) and row['one_pass'] == pytest.approx(2.0)
    assert row['aim'] == pytest.approx(1.9)
    assert row['mixing_of_copy'] == pytest.approx(4 / (28 / 1.9 - 10))
    # Never less than DeiT, though no mixing is fast enough for it.
    row = compare(aft, rival[:1], gpu, 'bfloat16')
    assert row['aim'] == 1 and row['mixing_of_copy'] == math.inf
    # Nothing is shorter than a launch.
    slow = replace(gpu, launch=0.05)
    assert [kernel_seconds(kernel, slow, 'bfloat16') for kernel in aft] == [0.05, 0.05]


def test_an_op_takes_as_long_as_its_bytes_or_its_products(rows):
    found = {(row['case'], row['training']): row for row in rows['ops']}
    simple = found['simple-b8-t4096-d1024', False]
    assert simple['bytes'] == 4 * 2 * 8 * 4096 * 1024 and simple['bound_by'] == 'bytes'
    assert simple['microseconds'] == pytest.approx(simple['bytes'] / (0.9 * 4.8e12) * 1e6)
    assert simple['of_copy'] == 1 and simple['aim'] == 0.65
    full = found['full-b8-t1024-d384', False]
    least = full['operations'] / (0.45 * 989e12)
    assert full['bound_by'] == 'products' and full['aim'] is None
    assert full['of_copy'] == pytest.approx(full['bytes'] / (0.9 * 4.8e12) / least)


def test_another_gpu_or_precision_is_printed_and_the_page_left_alone(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bounds, 'SIZES', (224,))
    monkeypatch.setattr(bounds, 'DECODERS', {})
    monkeypatch.setattr(bounds, 'DOCS', tmp_path / 'missing.md')
    texts, path = set(), tmp_path / 'out.json'
    for arguments in (['--gpu', 'h200'], ['--gpu', 'a100'], ['--precision', 'tf32']):
        bounds.main([*arguments, '--json', str(path)])
        texts.add(capsys.readouterr().out)
    assert len(texts) == 3 and all('small h384 k11' in text for text in texts)
    assert '"precision": "tf32"' in path.read_text() and 'data sheet' in path.read_text()
