"""Pictures of CTC alignments."""

import numpy as np
import pytest

from aft_mm.visualization import draw_alignment

NAMES = ('<blank>', '<unk>', ' ', 'b', 'a')


def test_units_are_at_their_peaks_and_rows_in_time_order(tmp_path):
    probs = np.full((9, 5), 0.01)
    for frame, unit, height in (
        (0, 0, 0.9),
        (1, 4, 0.5),
        (2, 4, 0.9),
        (3, 4, 0.6),
        (4, 0, 0.9),
        (5, 3, 0.8),
        (6, 2, 0.7),
        (7, 3, 0.9),
        (8, 0, 0.9),
    ):
        probs[frame, unit] = height
    figure = draw_alignment(np.log(probs), NAMES, 0.02, 'ab b')
    axis = figure.axes[0]
    found = [(text.get_text(), round(text.get_position()[0] / 0.02 - 0.5)) for text in axis.texts]
    assert found == [('a', 2), ('b', 5), ('␣', 6), ('b', 7)]
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ['a', 'b', '␣', '<blank>']
    np.testing.assert_allclose(axis.images[0].get_array(), probs.T[[4, 3, 2, 0]])
    assert axis.get_title() == 'ab b' and axis.get_xlim() == (0, pytest.approx(0.18))
    figure.savefig(tmp_path / 'a.png')


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match=r'log_probs must be \[T, 5\] .* got \[9, 4\]'):
        draw_alignment(np.zeros((9, 4)), NAMES, 0.02)
