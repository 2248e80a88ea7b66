"""What the mixers of the benchmarks are called."""

# With the window behind the name, such as aft-local-32.
WINDOWED = {
    'aft-local': dict(type='aft_mm.AFTLocal', rank=64),
    'dense-aft-local': dict(type='aft_mm.DenseAFTLocal', rank=64),
    'aft-local-learned': dict(type='aft_mm.AFTLocalLearned', rank=64),
    'aft-local-hard': dict(type='aft_mm.AFTLocalHard'),
}
PLAIN = {
    'aft-simple': dict(type='aft_mm.AFTSimple'),
    'aft-full': dict(type='aft_mm.AFTFull', rank=64),
    'bound': dict(type='aft_mm.NoMixing'),
}
# That take a number of heads.
WITH_HEADS = {
    'aft-conv': dict(type='aft_mm.AFTConv', kernel_size=31),
    'softmax': dict(type='aft_mm.SoftmaxAttention'),
    'dense-softmax': dict(type='aft_mm.DenseSoftmaxAttention'),
    'linear': dict(type='aft_mm.LinearAttention'),
    'performer': dict(type='aft_mm.PerformerAttention'),
    **{f'lsh-{n}': dict(type='aft_mm.LSHAttention', num_rounds=n) for n in (1, 4, 8)},
}
MIXER_NAMES = (
    f'{", ".join([*PLAIN, *WITH_HEADS])}, {", ".join(f"{name}-WINDOW" for name in WINDOWED)}, '
    'or a registered mixer with its arguments by name, such as aft_mm.AFTSimple or '
    '"aft_mm.AFTLocal(window=32, rank=None)"'
)
