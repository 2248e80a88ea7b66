"""Every registered mixer with its `example` arguments, and with further options."""

import inspect

import pytest
import torch
from torch import nn

from aft_mm.layers import MIXERS as CLASSES
from aft_mm.layers import TokenMixer
from aft_mm.registry import MODELS

D, B = 12, 2

REGISTERED = dict(CLASSES)
# Further options of a mixer, named TYPE-OPTION.
VARIANTS = {
    'AFTFull-free': dict(rank=None),
    'AFTFull-nearest': dict(rank=3, longer='nearest'),
    'AFTFull-log': dict(longer='log', num_heads=3),
    'AFTLocal-free': dict(window=2, rank=None),
    'AFTLocal-nearest': dict(window=2, longer='nearest'),
    'AFTLocalLearned-free': dict(window=2, rank=None),
    'AFTSimple-relu': dict(key_function='relu'),
    'AFTSimple-relu2': dict(key_function='relu2'),
    'AFTConv-no-query': dict(num_heads=12, kernel_size=3, query=False),
    'AFTConv-degenerate': dict(num_heads=1, kernel_size=5, global_connectivity=False),
    'AFTConv-naive': dict(num_heads=6, kernel_size=3, reparameterize=False),
    'SoftmaxAttention-stateless': dict(num_heads=3, stateful=False),
    'LocalSoftmaxAttention-margin': dict(num_heads=4, window=3, margin=1),
    'LinearAttention-square': dict(num_heads=2, feature_map='square'),
    'StridedAttention-fixed': dict(num_heads=2, stride=4, pattern='fixed', summary=2, qk_dims=10),
    'LSHAttention-one-bucket': dict(num_heads=2, num_rounds=1, num_buckets=1, chunk_size=5),
}
MIXERS = {**{name: cls.example for name, cls in REGISTERED.items()}, **VARIANTS}
GRIDS = [(1,), (7,), (3, 5), (6, 1)]
ONE_DIMENSIONAL = (
    'AFTFull-nearest',
    'AFTFull-log',
    'AFTLocal-free',
    'AFTLocal-nearest',
    'AFTLocalLearned-free',
)


def mixer_class(name: str) -> type[TokenMixer]:
    return REGISTERED[name.partition('-')[0]]


CAUSAL = [name for name in MIXERS if mixer_class(name).can_be_causal]
STEPPED = [name for name in CAUSAL if mixer_class(name)._mix_step is not TokenMixer._mix_step]
NORMALIZED = [
    name
    for name in MIXERS
    if mixer_class(name).normalized and name not in ('AFTSimple-relu', 'AFTSimple-relu2')
]


def build(name: str, grid=(7,), **kwargs) -> TokenMixer:
    """Build a mixer with random parameters, so that no error is hidden by a zero."""
    if name in ONE_DIMENSIONAL:
        grid = (torch.Size(grid).numel(),)
    cls, arguments = mixer_class(name), {**MIXERS[name], **kwargs}
    required = [
        p.name
        for p in list(inspect.signature(cls.__init__).parameters.values())[2:]
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD and p.name not in arguments
    ]
    if required:
        pytest.fail(
            f'{cls.__name__} must have a class attribute `example`, a dict of small values for its '
            f'required arguments {", ".join(required)} with embed_dims={D}'
        )
    config = dict(type=f'aft_mm.{cls.__name__}', embed_dims=D, grid=grid)
    mixer = MODELS.build({**config, **arguments})
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer


def tokens(grid) -> torch.Tensor:
    return torch.randn(B, torch.Size(grid).numel(), D)


def check_steps(mixer, x, lengths=None, **close):
    """Compare steps after prompts of these lengths with the forward; return the last state.

    Without lengths, start with an empty state.
    """
    expected, each = mixer(x), torch.arange(len(x))
    if lengths is None:
        lengths, prompt, state = torch.zeros(len(x), dtype=torch.long), 0, mixer.init_state(len(x))
    else:
        lengths = torch.tensor(lengths).clamp_max(x.shape[1] - 1)
        prompt = int(lengths.max()) or 1
        given = torch.arange(prompt) < lengths[:, None]
        y, state = mixer.prefill(x[:, :prompt].masked_fill(~given[..., None], torch.nan), lengths)
        torch.testing.assert_close(y[given], expected[:, :prompt][given], **close)
    for n in range(x.shape[1] - prompt):
        y_t, state = mixer.step(x[each, lengths + n], state)
        torch.testing.assert_close(y_t, expected[each, lengths + n], **close)
        assert (state.position == lengths + n + 1).all()
    return state
