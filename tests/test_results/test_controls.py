"""Verdicts on models without AFT's keys, and on ten seeds, are those of the runs."""

from ..documents import text_of
from .shown import SPEECH, WORDS, Claim, values

DIGITS = 'fsdd', WORDS
AFT = 'aft-conv*', 'aft-simple*'
CONTROLS = 'depthwise*', 'pooling*', 'token-shift*', 'identity*'


def holm(numbers):
    """Return the largest p value of a family after Holm's correction."""
    return max((len(numbers) - place) * p for place, p in enumerate(sorted(numbers)))


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
        found = [
            Claim(DIGITS, group, other) for group in (*AFT, *CONTROLS, 'transformer*', 'conformer*')
        ]
        assert all(claim.mean < 0 for claim in found) and holm([claim.p for claim in found]) < 0.05


def test_errors_of_ten_seeds_in_yes_and_no():
    errors = [round(0.32 * value) for value in values('yesno', '*', WORDS)]
    assert [errors.count(number) for number in range(4)] == [7, 0, 2, 1] and len(errors) == 10
    sentence = 'Of ten seeds, seven make no error in the 32 words of the test, two make two'
    assert f'{sentence}, one makes three' in ' '.join(text_of(SPEECH).split())
