"""Statistics of position biases."""

import numpy as np
import pytest
import torch

from aft_mm.analysis.plot_position_bias import AXES, position_bias_table


def test_a_kernel_with_one_place_and_a_flat_one():
    w = torch.zeros(2, 5, 7)
    w[1, 4, 1] = 60.0  # two rows below and two columns left of the query
    flat, peak = position_bias_table({'layer 3': w}, top=3)

    assert (flat['layer'], flat['head'], peak['head']) == ('layer 3', 0, 1)
    assert flat['entropy_bits'] == pytest.approx(np.log2(35))
    assert flat['top_3'] == pytest.approx(3 / 35)
    assert (flat['centre_row'], flat['centre_column']) == pytest.approx((0, 0), abs=1e-12)
    # Variances of -2 … 2 and -3 … 3.
    assert flat['width'] == pytest.approx(np.sqrt(2 + 4))
    assert peak['entropy_bits'] == pytest.approx(0, abs=1e-12)
    assert peak['top_3'] == pytest.approx(1)
    assert (peak['centre_row'], peak['centre_column']) == pytest.approx((2, -2))
    assert peak['width'] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize('causal', [False, True])
def test_a_dense_bias_is_the_mean_over_queries_of_what_they_see(causal):
    grid, w = (3, 4), torch.randn(1, 13, 13)
    (row,) = position_bias_table({'layer 0': w}, grid, 1, causal=causal, top=2)

    tops, entropies, centres, widths = [], [], [], []
    for t in range(12):
        seen = range(t + 1) if causal else range(12)
        p = np.exp([float(w[0, 1 + t, 1 + s]) for s in seen])
        p /= p.sum()
        offsets = np.array([np.subtract(divmod(s, 4), divmod(t, 4)) for s in seen])
        centre = p @ offsets
        tops.append(np.sort(p)[-2:].sum())
        entropies.append(-(p * np.log2(p)).sum())
        centres.append(centre)
        widths.append(np.sqrt(p @ ((offsets - centre) ** 2).sum(1)))
    assert row['top_2'] == pytest.approx(np.mean(tops))
    assert row['entropy_bits'] == pytest.approx(np.mean(entropies))
    assert (row['centre_row'], row['centre_column']) == pytest.approx(tuple(np.mean(centres, 0)))
    assert row['width'] == pytest.approx(np.mean(widths))


@pytest.mark.parametrize('kernel', [(15,), (3, 5), (3, 3, 5)])
def test_a_causal_kernel_has_no_later_offsets(kernel):
    w, centre = torch.randn(1, *kernel), [size // 2 for size in kernel]
    seen = [place for place in np.ndindex(*kernel) if list(place) <= centre]
    p = np.exp([float(w[0][place]) for place in seen])
    p /= p.sum()
    offsets = np.subtract(seen, centre)
    for index in np.ndindex(*kernel):
        if index not in seen:
            w[0][index] = 30.0
    (row,) = position_bias_table({'layer 0': w}, causal=True)
    axes = AXES[len(kernel)]
    assert [row[f'centre_{axis}'] for axis in axes] == pytest.approx(list(p @ offsets))
    assert row['entropy_bits'] == pytest.approx(-(p * np.log2(p)).sum())
    assert row['width'] == pytest.approx(np.sqrt(p @ ((offsets - p @ offsets) ** 2).sum(1)))


def test_sequences_have_an_offset():
    w = torch.full((1, 5), -60.0)
    w[0, 4] = 0
    (row,) = position_bias_table({'layer 0': w})
    assert row['centre_offset'] == pytest.approx(2)
