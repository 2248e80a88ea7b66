"""Layers and models where torch is the only package: the same numbers as with mmengine."""

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from pathlib import Path

# torch, its requirements as of 2.11 but Triton, which CPU builds lack, and this package.
VISIBLE = {'aft_mm', 'functorch', 'torch', 'torchgen', 'filelock', 'fsspec', 'jinja2', 'markupsafe'}
VISIBLE |= {'mpmath', 'networkx', 'setuptools', 'sympy', 'typing_extensions'}


class OnlyTorch(MetaPathFinder):
    """Finds what another finder does, if it is in the standard library or visible."""

    def __init__(self, finder: MetaPathFinder) -> None:
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        top = name.partition('.')[0]
        visible = top in VISIBLE | sys.stdlib_module_names or top.startswith('_sysconfigdata')
        return self.finder.find_spec(name, path, target) if visible else None


def sums() -> dict[str, float]:
    import torch

    import aft_mm.layers
    import aft_mm.models
    from aft_mm.registry import MODELS

    torch.set_num_threads(1)
    found = {}

    def record(name, module, output) -> None:
        (output * torch.randn_like(output)).sum().backward()
        found[f'{name} output'] = output.double().norm().item()
        for path, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[f'{name} {path}'] = parameter.grad.double().norm().item()
        assert any(key.startswith(f'{name} ') and 'output' not in key for key in found)

    def build(**config):
        torch.manual_seed(0)
        return MODELS.build(config).train()

    for name, cls in aft_mm.layers.MIXERS.items():
        for causal in (False, True)[: 1 + cls.can_be_causal]:
            mixer = build(
                type=f'aft_mm.{name}', embed_dims=12, grid=(7,), causal=causal, **cls.example
            )
            record(f'{name} {causal}', mixer, mixer(torch.randn(2, 7, 12, requires_grad=True)))
    image = build(
        type='AFTViT',
        arch=dict(embed_dims=12, num_layers=3),
        img_size=32,
        drop_path_rate=0.5,
        drop_rate=0.1,
    )
    record('AFTViT', image, image(torch.randn(4, 3, 40, 32))[0])
    text = build(
        type='aft_mm.AutoregressiveModel',
        decoder=dict(
            type='aft_mm.SequenceDecoder',
            embed_dims=12,
            num_layers=2,
            embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=11),
            token_mixer=dict(type='aft_mm.AFTLocal', window=3, rank=4),
            grid=(9,),
        ),
        head=dict(type='aft_mm.CategoricalHead', embed_dims=12, num_classes=11),
    )
    batch = text.data_preprocessor(dict(inputs=[torch.arange(9), torch.arange(5)]))
    record('text', text, text(**batch, mode='loss')['loss'])
    nats = text(**batch, mode='predict')[1].nats
    found |= {'nats': nats, 'text parameters': sum(p.numel() for p in text.parameters())}
    tokens = text.generate(9, [[1, 2], [3]], seed=0)
    assert torch.equal(tokens, text.generate(9, [[1, 2], [3]], seed=0, use_state=False))
    return found | {f'token {i}': int(t) for i, t in enumerate(tokens.flatten())}


def test_numbers_are_those_with_mmengine():
    import torch  # not above: the process that runs this file hides numpy from it

    root = Path(__file__).parent.parent
    program = [sys.executable, '-W', 'ignore', __file__]
    environment = {**os.environ, 'PYTHONPATH': str(root)}
    run = subprocess.run(program, env=environment, text=True, capture_output=True)
    assert run.returncode == 0, run.stderr
    alone, ours = json.loads(run.stdout), sums()
    assert alone.keys() == ours.keys()
    torch.testing.assert_close(
        torch.tensor([alone[k] for k in ours]), torch.tensor([ours[k] for k in ours])
    )


if __name__ == '__main__':
    sys.meta_path[:] = [OnlyTorch(finder) for finder in sys.meta_path]
    for package in ('timm', 'transformers'):
        try:
            import_module(f'aft_mm.{package}')
        except ModuleNotFoundError as error:
            assert str(error).startswith(f'aft_mm.{package} needs {package}, ')
            assert str(error).endswith(f'which pip install aft_mm[{package}] installs')
    for config in ({}, 'AFTViT'):
        try:
            import_module('aft_mm.registry').MODELS.build(config)
        except ValueError as error:
            assert str(error) == f'config must be a dict with a type, got {config!r}'
        else:
            raise AssertionError(config)
    result = sums()
    assert not {'numpy', 'mmengine', 'torchvision'} & sys.modules.keys()
    print(json.dumps(result))
