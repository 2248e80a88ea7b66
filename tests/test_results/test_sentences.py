"""Intervals, p values and single runs in sentences are those of the runs."""

import math
import re
import statistics

import pytest

from aft_mm.analysis.run_files import records_of
from aft_mm.analysis.run_logs import trained

from ..documents import text_of
from .shown import (
    AN4,
    AN4_WORDS,
    BITS,
    CIFAR10,
    CLAIMS,
    CLAIMS_IMAGES,
    CONV,
    COPY,
    IMAGENETTE,
    LISTOPS,
    LISTOPS_HITS,
    LONGER,
    MIXERS,
    MNIST,
    PATHS,
    PEAK,
    RECALL,
    REPRODUCTION,
    SOFTMAX,
    SPEECH,
    STREETS,
    TEXT,
    TOP1,
    WORDS,
    Claim,
    reprinted,
    runs,
    values,
)

SENTENCES = [
    (
        REPRODUCTION,
        'average pooling (p = {0.p:.3f}), no mixing (p = {1.p:.3f}) and DeiT (p = {2.p:.2f})',
        [(IMAGENETTE, 'aft-conv*', other) for other in ('pooling*', 'identity*', 'deit*')],
    ),
    (
        REPRODUCTION,
        'AFT-conv is {0.mean:.1f} points ahead of DeiT (p = {0.p:.3f}) and {1.size:.1f} behind a '
        'plain depthwise convolution of the same kernel and size (p = {1.p:.3f}). AFT-full is '
        '{2.mean:.1f} ± {2.half:.1f} points ahead of DeiT (p = {2.p:.3f}); its difference from '
        'AFT-conv is inconclusive (p = {3.p:.2f}). Average pooling and no mixing are {4.size:.1f} '
        'and {5.size:.1f} points behind AFT-conv',
        [
            (CIFAR10, 'aft-conv-mini*', 'deit*'),
            (CIFAR10, 'aft-conv-mini*', 'depthwise*'),
            (CIFAR10, 'aft-full*', 'deit*'),
            (CIFAR10, 'aft-full*', 'aft-conv-mini*'),
            (CIFAR10, 'pooling*', 'aft-conv-mini*'),
            (CIFAR10, 'identity*', 'aft-conv-mini*'),
        ],
    ),
    (
        REPRODUCTION,
        'is {0.mean:.1f} ± {0.half:.1f} points ahead of DeiT (p = {0.p:.2f}); its difference from '
        'AFT-conv is inconclusive (p = {1.p:.1f}), and it is {2.size:.1f} points behind the '
        'depthwise convolution (p = {2.p:.2f})',
        [(CIFAR10, 'token-shift*', other) for other in ('deit*', 'aft-conv-mini*', 'depthwise*')],
    ),
    (
        REPRODUCTION,
        'AFT-conv is {0.mean:.1f} points ahead of DeiT (p = {0.p:.2f}) and {1.size:.1f} behind the '
        'depthwise convolution (p = {1.p:.2f})',
        [(LONGER, 'aft-conv-mini*', 'deit*'), (LONGER, 'aft-conv-mini*', 'depthwise*')],
    ),
    (
        REPRODUCTION,
        'it reaches {0.mean:.4f} ± {0.half:.4f} bits/dim on 7,500',
        [(('mnist', 'bits_per_dim'), 'aft-conv*')],
    ),
    (
        REPRODUCTION,
        '{0.size:.3f} ± {0.half:.3f} ahead of AFT-simple and {1.size:.3f} ± {1.half:.3f} ahead of '
        'softmax attention',
        [(MNIST, CONV, 'aft-simple-*_seed?'), (MNIST, CONV, SOFTMAX)],
    ),
    (
        REPRODUCTION,
        'The difference between AFT-conv and the depthwise convolution is inconclusive '
        '(p = {0.p:.2f}): the convolution needs',
        [(MNIST, CONV, 'depthwise-*_seed?')],
    ),
    (
        REPRODUCTION,
        'AFT-local is {0.size:.3f} ± {0.half:.3f} bits/char ahead of the learned weights',
        [(CLAIMS, 'enwik8-window-32_*', 'enwik8-learned-32_*')],
    ),
    (
        REPRODUCTION,
        'sigmoid-softmax ({0.mean:.4f} bits/char): relu-softmax {1.mean:.3f} ± {1.half:.3f} '
        '(inconclusive), relu {2.mean:+.3f} ± {2.half:.3f} and relu2 {3.mean:+.3f} ± {3.half:.3f} '
        '(same sign here); of relu2 from relu: {4.mean:.3f} ± {4.half:.3f}',
        [
            (CLAIMS, 'enwik8-window-0_*'),
            *((CLAIMS, f'enwik8-{key}_*', 'enwik8-window-0_*') for key in ('relu-softmax', 'relu')),
            (CLAIMS, 'enwik8-relu2_*', 'enwik8-window-0_*'),
            (CLAIMS, 'enwik8-relu2_*', 'enwik8-relu_*'),
        ],
    ),
    (
        REPRODUCTION,
        'AFT-conv has {0.mean:.1f} ± {0.half:.1f} % top-1. Differences from it: {1.mean:.1f} ± '
        '{1.half:.1f} without the query, {2.mean:.1f} ± {2.half:.1f} not reparameterised, '
        '{3.mean:+.1f} ± {3.half:.1f} without global connectivity, {4.mean:+.1f} ± {4.half:.1f} '
        'with the entropy penalty',
        [
            (CLAIMS_IMAGES, 'imagenette-conv_*'),
            *(
                (CLAIMS_IMAGES, f'imagenette-{change}_*', 'imagenette-conv_*')
                for change in ('no-query', 'naive', 'no-global', 'entropy')
            ),
        ],
    ),
    (
        REPRODUCTION,
        'ahead of softmax attention by {0.size:.3f} ± {0.half:.3f} bits per subword '
        "(p = {0.p:.3f}, Welch's t). The difference between AFT-simple and softmax attention, "
        '{1.mean:.3f} ± {1.half:.3f}, is inconclusive, so the lead needs the local bias, but '
        'not AFT: the difference from the convolution over as many tokens, '
        '{4.mean:.3f} ± {4.half:.3f} (p = {4.p:.2f}), is inconclusive, too. - BLEU: all differences are inconclusive. AFT-local-16 minus softmax attention is {2.mean:.1f} ± {2.half:.1f}, AFT-simple minus '
        'softmax attention {3.mean:.1f} ± {3.half:.1f}',
        [
            (('multi30k', 'bits_per_subword'), 'aft-local*', 'transformer*'),
            (('multi30k', 'bits_per_subword'), 'aft-simple*', 'transformer*'),
            (('multi30k', 'bleu'), 'aft-local*', 'transformer*'),
            (('multi30k', 'bleu'), 'aft-simple*', 'transformer*'),
            (('multi30k', 'bits_per_subword'), 'aft-local*', 'depthwise*'),
        ],
    ),
    (
        REPRODUCTION,
        'does not differ significantly from AFT-conv ({0.size:.2f} ± {0.half:.2f} nats)',
        [(COPY, 'depthwise-*', 'aft-conv-*', math.log(2))],
    ),
    (
        REPRODUCTION,
        'here it stays {0.mean:.2f} ± {0.half:.2f} nats behind (p = {0.p:.2f}, opposite',
        [(COPY, 'linear-*', 'transformer-*', math.log(2))],
    ),
    (
        REPRODUCTION,
        'is {0.size:.3f} ± {0.half:.3f} bits ahead of AFT-conv, a token shift {1.size:.3f} ± '
        '{1.half:.3f}. After so few',
        [(TEXT, 'depthwise-*_seed?', CONV), (TEXT, 'token-shift-*_seed?', CONV)],
    ),
    (
        REPRODUCTION,
        '{0.size:.3f} ± {0.half:.3f} bits ahead of AFT-conv with the initial bias below, '
        '{1.size:.3f} ± {1.half:.3f} ahead of the depthwise convolution',
        [(TEXT, 'lstm-*_seed?', PEAK), (TEXT, 'lstm-*_seed?', 'depthwise-*_seed?')],
    ),
    (
        REPRODUCTION,
        'AFT-conv is then {0.size:.3f} ± {0.half:.3f} bits ahead of the depthwise convolution',
        [(TEXT, PEAK, 'depthwise-*_seed?')],
    ),
    (
        REPRODUCTION,
        'on enwik8 {0.size:.3f} ± {0.half:.3f} bits better (p < 0.001)',
        [(TEXT, PEAK, CONV)],
    ),
    (
        REPRODUCTION,
        'has {0.mean:.3f} ± {0.half:.3f} bits/char, {1.size:.3f} ± {1.half:.3f} better than '
        'AFT-conv (p < 0.001); with `init_peak=6` {2.mean:.3f} ± {2.half:.3f}, and the order '
        'relative to AFT-conv with this start is inconclusive (p = {3.p:.2f})',
        [
            (TEXT, 'enwik8_peak:signed_aft*'),
            (TEXT, 'enwik8_peak:signed_aft*', CONV),
            (TEXT, 'enwik8_peak:signed_peak*'),
            (TEXT, 'enwik8_peak:signed_peak*', PEAK),
        ],
    ),
    (
        REPRODUCTION,
        '{0.size:.3f} ± {0.half:.3f} bits worse (p < 0.001), on',
        [(LISTOPS, 'aft-conv-*peak_*', 'aft-conv-*2e_*')],
    ),
    (
        REPRODUCTION,
        '({0.size:.3f} ± {0.half:.3f} bits worse) and on',
        [(RECALL, 'aft-conv-*peak_*_seed?', 'aft-conv-*2e_*_seed?')],
    ),
    (
        REPRODUCTION,
        'with `init_peak=3` ({0.size:.1f} ± {0.half:.1f} points better)',
        [(('fsdd', WORDS), 'fsdd/init_peak:aft-conv*', 'aft-conv*')],
    ),
    (
        REPRODUCTION,
        'puts AFT-conv {0.size:.3f} ± {0.half:.3f} bits ahead of AFT-local-hard-32; without it, '
        'AFT-conv is {1.size:.3f} ± {1.half:.3f} bits behind: it reaches {2.mean:.3f} ± '
        '{2.half:.3f} bits/char',
        [
            (TEXT, CONV, 'aft-local-hard-*_seed?'),
            (TEXT, 'enwik8_naive_kernel:*', 'aft-local-hard-*_seed?'),
            (TEXT, 'enwik8_naive_kernel:*'),
        ],
    ),
    (
        REPRODUCTION,
        'is inconclusive (p = {0.p:.2f}); ResNet-18 has {1.mean:.1f} ± {1.half:.1f} more than '
        'AFT-conv (p = {1.p:.2f})',
        [
            (STREETS, '*pool*', 'upernet-aft*2400i*'),
            (STREETS, '*resnet*', 'upernet-aft*2400i*'),
        ],
    ),
    (
        MIXERS,
        'give AFT-full {0.mean:.3f} ± {0.half:.3f} bits, no significant difference (p = {1.p:.2f};',
        [
            (('synthetic_tasks/mqar_layers', BITS), 'aft-full-*'),
            (RECALL, 'synthetic_tasks/mqar_layers:aft-full-*', 'aft-full-*_seed?'),
        ],
    ),
    (
        MIXERS,
        'softmax attention with one layer has {0.mean:.3f} ± {0.half:.3f}.',
        [(('synthetic_tasks/mqar_layers', BITS), 'transformer-*')],
    ),
    (
        MIXERS,
        'LSH attention is {0.mean:.2f} ± {0.half:.2f} bits behind softmax attention '
        '(p = {0.p:.2f})',
        [(RECALL, 'reformer-*_seed?', SOFTMAX)],
    ),
    (
        MIXERS,
        'Performer is {0.mean:.2f} ± {0.half:.2f} bits behind AFT-conv (p = {0.p:.3f})',
        [(RECALL, 'performer-*_seed?', 'aft-conv-*2e_*_seed?')],
    ),
    (
        MIXERS,
        '(AFT-simple by {0.size:.3f} ± {0.half:.3f} bits, p = {0.p:.3f}; AFT-conv by {1.size:.3f} '
        '± {1.half:.3f}, p = {1.p:.3f})',
        [
            (LISTOPS, 'aft-simple-*', 'linear-*'),
            (LISTOPS, 'aft-conv-*2e_*', 'linear-*'),
        ],
    ),
    (
        MIXERS,
        'are behind average pooling (p = {0.p:.2f}, {1.p:.2f}, {2.p:.3f})',
        [(LISTOPS, other, 'pooling-*') for other in ('sparse-*', 'performer-*', 'reformer-*')],
    ),
    (
        MIXERS,
        'the depthwise convolution is behind it (p = {0.p:.2f}); AFT-simple and AFT-conv are not '
        'significantly ahead of linear attention (p = {1.p:.2f} and {2.p:.1f})',
        [
            (LISTOPS_HITS, 'depthwise-*', 'transformer-*'),
            (LISTOPS_HITS, 'aft-simple-*', 'linear-*'),
            (LISTOPS_HITS, 'aft-conv-*2e_*', 'linear-*'),
        ],
    ),
    (
        MIXERS,
        'with one seed at 69.1 %, p = {0.p:.4f})',
        [(PATHS, 'linear-*_seed?', 'identity-*_seed?')],
    ),
    (
        MIXERS,
        'ahead of strided attention (p = {0.p:.3f}), which is ahead of average pooling '
        '(p = {1.p:.2f})',
        [
            (PATHS, 'depthwise-*_seed?', 'sparse-*_seed?'),
            (PATHS, 'sparse-*_seed?', 'pooling-*_seed?'),
        ],
    ),
    (
        MIXERS,
        'AFT-conv is ahead of softmax attention (p = {0.p:.3f}), AFT-local (p = {1.p:.2f}), LSH '
        'attention and Performer (p = {2.p:.2f})',
        [(PATHS, CONV, f'{other}-*_seed?') for other in ('deit', 'aft-local2d', 'reformer')],
    ),
    (
        MIXERS,
        'attention have {0.mean:.1f} ± {0.half:.1f} and {1.mean:.1f} ± {1.half:.1f}',
        [
            (('synthetic_tasks/pathfinder_lower_rate', TOP1), f'{name}-*_seed?')
            for name in ('deit', 'linear')
        ],
    ),
    (
        SPEECH,
        'In free spelling, AFT-conv is ahead of AFT-simple (p = {0.p:.2f}); its order relative to '
        "softmax attention (p = {1.p:.2f}, 0.10 with Holm's correction), the convolution "
        '(p = {2.p:.2f}) and the Bi-LSTM (p = {3.p:.2f}) is inconclusive. The convolution is ahead '
        'of AFT-simple and softmax attention (p = {4.p:.3f} and {5.p:.3f}, not corrected), so '
        "AFT-conv's lead needs no keys. "
        'With the lexicon, AFT-conv, the convolution, softmax attention and AFT-simple are ahead of '
        'the Bi-LSTM (p = {6.p:.3f}, {7.p:.2f}, {8.p:.2f}, {9.p:.2f})',
        [
            *((AN4, 'aft-conv*', f'{x}*') for x in ('aft-simple', 'transf', 'depth', 'bi-lstm')),
            *((AN4, 'depthwise*', other) for other in ('aft-simple*', 'transformer*')),
            *((AN4_WORDS, f'{x}*', 'bi-lstm*') for x in ('aft-conv', 'depth', 'transf', 'aft-s')),
        ],
    ),
    (
        SPEECH,
        'no significant difference (p = {0.p:.2f})',
        [(('fsdd', WORDS), 'fsdd/init_peak:aft-conv*', 'aft-conv*')],
    ),
    (
        'docs/configs.md',
        '0.01 for u and v gives {0.mean:.4f} ± {0.half:.4f} bits/char more than 0.1',
        [(CLAIMS, 'init_std:factors-0.01_*', 'enwik8-window-32_*')],
    ),
]


@pytest.mark.parametrize(('page', 'sentence', 'claims'), SENTENCES)
def test_intervals_and_p_values_in_sentences_are_those_of_the_runs(page, sentence, claims):
    text = ' '.join(re.sub(r'[*]', '', text_of(page)).split()).replace('−', '-')
    expected = sentence.format(*(Claim(*claim) for claim in claims))
    assert expected in text


# Bounds of p that sentences give for several groups.
BOUNDS = [
    (IMAGENETTE, ('aft-full*', 'token-shift*', 'depthwise*'), 'deit*', 0.035),
    (CIFAR10, ('pooling*', 'identity*'), 'aft-conv-mini*', 1e-4),
    (MNIST, ('aft-simple-*_seed?', CONV), SOFTMAX, 1e-4),
    (MNIST, (CONV,), 'aft-simple-*_seed?', 1e-4),
    (MNIST, ('aft-simple-*_seed?', 'aft-local-*_seed?'), SOFTMAX, 0.0115),
    (RECALL, ('aft-full-*_seed?', 'aft-local-*_seed?', 'aft-simple-*_seed?'), SOFTMAX, 1e-4),
    (RECALL, ('pooling-*_seed?', 'depthwise-*_seed?', 'lstm-*_seed?', CONV), SOFTMAX, 1e-4),
    (RECALL, ('aft-full-*_seed?', 'aft-local-*_seed?', CONV), 'synthesizer-*_seed?', 1e-3),
    (LISTOPS, ('aft-simple-*', 'aft-full-*', 'aft-local-*', 'aft-conv-*2e_*'), 'synth*', 2e-3),
    (PATHS, ('aft-simple-*_seed?', 'aft-full-*_seed?', 'deit-*_seed?'), 'pooling-*_seed?', 0.0135),
    (PATHS, ('reformer-*_seed?', 'performer-*_seed?'), 'pooling-*_seed?', 0.0135),
]


@pytest.mark.parametrize(('place', 'groups', 'other', 'bound'), BOUNDS)
def test_p_values_are_below_their_bounds(place, groups, other, bound):
    assert all(Claim(place, group, other).p < bound for group in groups)


def test_single_runs_in_sentences():
    text = ' '.join(text_of(REPRODUCTION).split())
    digits = values('quickstart', '*', TOP1)
    assert ', '.join(f'{x:.1f}' for x in digits) + ' ([runs](../results/quickstart' in text
    conv, full, deit, three, six = (
        values('cifar10', pattern, TOP1)[0]
        for pattern in ('aft-conv*_cifar10', 'aft-full*', 'deit*', '*_peak3', '*_peak6')
    )
    assert f'AFT-conv has {conv:.1f} %, AFT-full {full:.1f} and DeiT {deit:.1f}' in text
    assert f'0, 3 and 6 give {conv:.1f}, {three:.1f} and {six:.1f} % top-1' in text
    single = 'cifar10_full_single_runs'
    (longest,) = values(single, '*-28e-*', TOP1)
    assert f'AFT-conv has {longest:.1f} % ([run](' in text
    faster, *short = (
        values(single, f'{name}_seed0', TOP1)[0]
        for name in (
            'aft-conv_w-rate-5',
            'aft-conv_2-epochs_w-rate-5',
            'aft-conv_2-epochs',
            'depthwise-conv_2-epochs',
        )
    )
    usual, convolution = (
        values('cifar10_full', f'{name}-*_seed0', TOP1)[0] for name in ('aft-conv', 'depthwise')
    )
    assert (
        f'has {faster:.1f} % instead of {usual:.1f} without both, less than half of the way' in text
    )
    assert f"to the convolution's {convolution:.1f}." in text
    shown = 'two epochs have {:.1f} %, {:.1f} at the usual rate and {:.1f} with the convolution ([runs]('
    assert shown.format(*short) in text
    assert faster < (usual + convolution) / 2
    forms = [
        values(single, f'aft-conv_2-epochs_{x}_seed0', TOP1)[0] for x in ('peak-6', 'no-global')
    ]
    assert (
        '`init_peak=6` has {:.1f} % and `global_connectivity=False` {:.1f}.'.format(*forms) in text
    )
    peaks = [
        values('enwik8_peak', f'{name}*_seed0', 'bits_per_char')[0]
        for name in ('peak3_', 'aft-', 'peak9_')
    ]
    assert 'gives {:.3f}, {:.3f} and {:.3f} bits/char'.format(*peaks) in text
    found = {}
    for name in ('transformer', 'aft-local'):
        (run,) = runs('warm_up', f'{name}*')
        records = records_of(run)
        losses = [loss for _, loss in trained(records, 'loss')]
        step, norm = max(trained(records, 'grad_norm'), key=lambda point: point[1])
        found[name] = statistics.mean(losses[-20:]) / math.log(2), norm, step
    (softmax, norm, step), (local, norm2, step2) = found.values()
    assert f'ends at {softmax:.2f} bits/char (mean of the last 20 iterations)' in text
    assert f'AFT-local-32 at {local:.2f}.' in text
    assert f'norms are {norm:.0f} in iteration {step} and {norm2:.0f} in iteration {step2}' in text
    chairs = runs('chairs', '*')[0]['metrics']
    shown = 'is 0.0080 squared edges and the coverage 37.5 %; 71.3 %'
    numbers = chairs['mmd_squared_edges'], chairs['coverage_percent'], chairs['1nna_percent']
    assert reprinted(shown, numbers) == shown and shown in text
    softmax, full = (
        runs('celeba', f'*{kind}_celeba-8to32_8-epochs')[0]['metrics']
        for kind in ('softmax-encoder', '1xb8-16e')
    )
    for run, sentence in (
        (softmax, 'has {:.3f} bits/dim and a PSNR of {:.2f} dB per sample'),
        (full, 'cross-attention has {:.3f} and {:.2f} dB'),
    ):
        assert sentence.format(run['bits_per_dim'], run['sample_psnr_db']) in text
    validated = [
        runs('enwik8', f'aft-{name}*')[0]['val']['bits_per_char'][-1] for name in ('conv', 'local')
    ]
    shown = 'AFT-conv has {:.3f} bits/char; AFT-local-32, which saw a quarter less data, has {:.3f}'
    assert shown.format(*validated) in text


def test_errors_with_the_statistics_of_a_speaker():
    found = [
        statistics.mean(values('fsdd/per_speaker', f'{name}*', WORDS))
        for name in ('aft-conv', 'transformer', 'aft-simple')
    ]
    sentence = 'AFT-conv makes {:.1f} %, softmax attention {:.1f} %, AFT-simple {:.1f} % errors'
    assert sentence.format(*found) in ' '.join(text_of(SPEECH).split())
