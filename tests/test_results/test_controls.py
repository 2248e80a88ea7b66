"""Verdicts on models without AFT's keys, and on ten seeds, are those of the runs."""

from ..documents import text_of
from .shown import AN4, SPEECH, WORDS, Claim, holm, values

DIGITS = 'fsdd', WORDS
AFT = 'aft-conv*', 'aft-simple*'
CONTROLS = 'depthwise*', 'pooling*', 'token-shift*', 'identity*'


def test_leads_on_spoken_digits():
    text = ' '.join(text_of(SPEECH).split())
    assert 'is ahead of three controls (p ≤ 0.03, not corrected), AFT of none (p > 0.05)' in text
    assert all(Claim(DIGITS, aft, other).p > 0.05 for aft in AFT for other in CONTROLS)
    ahead = [Claim(DIGITS, 'transformer*', other).p < 0.035 for other in CONTROLS]
    assert ahead == [True, True, True, False]
    assert (
        "TDNN and Bi-LSTM (p < 0.05 with Holm's correction for each of the two), also without mixing"
        in text
    )
    for other in ('tdnn*', 'bi-lstm*'):
        groups = *AFT, *CONTROLS, 'transformer*', 'conformer*'
        found = {group: Claim(DIGITS, group, other) for group in groups}
        assert all(claim.mean < 0 for claim in found.values())
        assert max(holm({group: claim.p for group, claim in found.items()}).values()) < 0.05


def test_controls_of_characters():
    found = holm({name: Claim(AN4, AFT[0], name).p for name in CONTROLS})
    shown = 'ahead of no mixing (p = {:.3f}); its order relative to the convolution (p = {:.2f}), '
    shown += 'average pooling (p = {:.2f}) and the token shift (p = {:.2f}) is inconclusive'
    order = 'identity*', 'depthwise*', 'pooling*', 'token-shift*'
    assert shown.format(*(found[name] for name in order)) in ' '.join(text_of(SPEECH).split())
    assert [name for name in order if found[name] < 0.05] == ['identity*']


def test_errors_of_ten_seeds_in_yes_and_no():
    errors = [round(0.32 * value) for value in values('yesno', '*', WORDS)]
    assert [errors.count(number) for number in range(4)] == [7, 0, 2, 1] and len(errors) == 10
    sentence = 'Of ten seeds, seven make no error in the 32 words of the test, two make two'
    assert f'{sentence}, one makes three' in ' '.join(text_of(SPEECH).split())
