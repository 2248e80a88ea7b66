"""Verdicts on hybrids are those of the runs, with Holm's correction over each family."""

from aft_mm.analysis.verdicts import verdict_table

from ..documents import text_of
from .shown import (
    CIFAR10,
    MIXERS,
    RECALL,
    REPRODUCTION,
    SOFTMAX,
    Claim,
    mean_and_half,
    runs,
    values,
)


def ahead_and_behind(place, comparisons):
    """Return the comparisons with a significantly lower, and with a higher mean."""
    claims = {pair: Claim(place, *pair) for pair in comparisons}
    found: tuple[set, set] = set(), set()
    for number, pair in enumerate(sorted(claims, key=lambda pair: claims[pair].p)):
        if claims[pair].p * (len(claims) - number) >= 0.05:
            break
        found[claims[pair].mean > 0].add(pair)
    return found


def test_one_layer_of_softmax_attention_recalls_if_it_is_the_last():
    alone = {name: f'{name}-mini*_seed?' for name in ('aft-simple', 'aft-full')}
    last = {name: f'hybrid-{name}-transformer-*_seed?' for name in alone}
    first = {name: f'hybrid-transformer-{name}-*_seed?' for name in alone}
    family = [
        (hybrids[name], other)
        for hybrids in (last, first)
        for name in alone
        for other in (SOFTMAX, alone[name])
    ]
    assert len(family) == 8
    ahead, behind = ahead_and_behind(RECALL, family)
    assert ahead == {(last[name], alone[name]) for name in alone}
    assert behind == {(first[name], SOFTMAX) for name in alone}
    shown = sorted(values(RECALL[0], last['aft-full'], RECALL[1]))
    assert f'in two of three seeds (the third has {shown[2]:.3f} bits)' in ' '.join(
        text_of(MIXERS).split()
    )
    assert shown[1] < 0.001
    shifted, unmixed = (
        values(RECALL[0], f'hybrid-{name}-*', RECALL[1]) for name in ('token-shift', 'identity')
    )
    assert max(shifted) < 0.001 and min(unmixed) > 1.8


def test_aft_conv_after_two_convolutions():
    hybrid, convolutions = 'hybrid-depthwise-conv-aft-conv-*_seed?', 'depthwise-conv-*_seed?'
    lead, text = Claim(CIFAR10, hybrid, convolutions), ' '.join(text_of(REPRODUCTION).split())
    found = values(CIFAR10[0], hybrid, CIFAR10[1])
    assert len(found) == 3
    assert 'three seeds have {:.1f} ± {:.1f} %'.format(*mean_and_half(found)) in text
    # Holm's correction of the smallest p of three, whatever the others are.
    shown = f'{lead.mean:.1f} ± {lead.half:.1f} points more than three convolutions (p = {3 * lead.p:.3f})'
    assert shown in text
    (softmax,) = runs(CIFAR10[0], 'hybrid-depthwise-conv-deit-*')
    assert (
        f'the only run, seed {softmax["seed"]}, has {softmax["metrics"][CIFAR10[1]]:.1f} %' in text
    )


def test_equal_runs_have_no_interval():
    assert '| a | 2 | 2.000 |' in verdict_table({'a': [2.0, 2.0]}, 'bits')
