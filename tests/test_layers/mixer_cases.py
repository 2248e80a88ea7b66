"""Every registered mixer with its `example` arguments, and with further options."""

from math import prod

from aft_mm.layers import MIXERS as CLASSES
from aft_mm.layers import TokenMixer
from aft_mm.testing import BATCH as B
from aft_mm.testing import CHANNELS as D
from aft_mm.testing import MixerContract, check_steps, tokens

__all__ = ['CONTRACTS', 'MIXERS', 'ONE_DIMENSIONAL', 'B', 'D']
__all__ += ['build', 'check_steps', 'mixer_class', 'tokens']

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
MIXERS = {**{name: cls.example for name, cls in CLASSES.items()}, **VARIANTS}
LONGER = [name for name, arguments in VARIANTS.items() if 'longer' in arguments]
ONE_DIMENSIONAL = ('AFTLocal-free', 'AFTLocalLearned-free', *LONGER)


def mixer_class(name: str) -> type[TokenMixer]:
    return CLASSES[name.partition('-')[0]]


def contract(name: str) -> type[MixerContract]:
    attributes = dict(mixer=mixer_class(name), arguments=MIXERS[name])
    if name in ONE_DIMENSIONAL:
        attributes['grid'] = [(1,), (7,), (15,), (6,)]
    if name in LONGER:  # which refuses them
        attributes['test_prefix_tokens_precede_the_grid'] = None
    if name in ('AFTSimple-relu', 'AFTSimple-relu2'):
        attributes['normalized'] = False
    if name == 'AFTConv-degenerate':
        attributes['cancelling'] = (*MixerContract.cancelling, 'pos_bias.beta')
    if name == 'LSTM':
        attributes['steps_round'] = True
    return type(f'Test{name.replace("-", "_")}', (MixerContract,), attributes)


CONTRACTS = {name: contract(name) for name in MIXERS}


def build(name: str, grid=(7,), **options) -> TokenMixer:
    if name in ONE_DIMENSIONAL:
        grid = (prod(grid),)
    return CONTRACTS[name].build(grid, **options)
