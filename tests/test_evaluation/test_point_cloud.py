"""Distances of point clouds, compared with scipy and scikit-learn."""

from itertools import permutations

import numpy as np
import pytest
import torch
from mmengine.evaluator import Evaluator
from mmengine.registry import METRICS
from scipy.spatial import cKDTree
from sklearn.model_selection import LeaveOneOut, cross_val_score
from sklearn.neighbors import KNeighborsClassifier

from aft_mm.evaluation import PointCloudDistance
from aft_mm.evaluation.point_cloud_distance import (
    chamfer_distances,
    coverage,
    earth_mover_distances,
    minimum_matching_distance,
    nearest_neighbor_accuracy,
    normalized,
)
from aft_mm.structures import SequenceSample
from aft_mm.tokenizers import encode_points


def chamfer(a, b):
    return (cKDTree(b).query(a)[0] ** 2).mean() + (cKDTree(a).query(b)[0] ** 2).mean()


def clouds(num, points, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    # Flat and long clouds, so that distances differ.
    return rng.normal(size=(num, points, 3)) * rng.uniform(0.1, scale, (num, 1, 3))


def evaluate(pairs, batch_size=3, **options):
    """Return the metrics of pairs (samples [N, T] or None, truth [T])."""
    evaluator = Evaluator(METRICS.build(dict(type='aft_mm.PointCloudDistance', **options)))
    for i in range(0, len(pairs), batch_size):
        samples = [SequenceSample() for _ in pairs[i : i + batch_size]]
        for sample, (generated, _) in zip(samples, pairs[i : i + batch_size], strict=True):
            if generated is not None:
                sample.generated = torch.from_numpy(generated).long()
        inputs = [torch.from_numpy(truth) for _, truth in pairs[i : i + batch_size]]
        evaluator.process(data_samples=samples, data_batch=dict(inputs=inputs))
    return evaluator.evaluate(len(pairs))


@pytest.mark.parametrize('num, points', [(1, 7), (6, 63), (5, 1)])
@pytest.mark.parametrize('block', [1, 4, 100])
def test_chamfer_distances_equal_those_of_scipy(num, points, block):
    given = clouds(num, points)
    found = chamfer_distances(torch.from_numpy(given), block)
    expected = [[chamfer(a, b) for b in given] for a in given]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_chamfer_distances_of_quantised_points_are_exact_in_float32():
    tokens = np.random.default_rng(0).integers(0, 256, (4, 50, 3))
    points = torch.from_numpy((tokens + 0.5) / 256 - 0.5)
    single, double = (
        chamfer_distances(points.to(dtype), 2) for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=0)


@pytest.mark.parametrize('points', [1, 5])
def test_earth_mover_distance_is_the_minimum_over_permutations(points):
    given = clouds(4, points)
    found = earth_mover_distances(torch.from_numpy(given))
    orders = list(permutations(range(points)))
    expected = [
        [min(np.linalg.norm(a - b[list(order)], axis=1).mean() for order in orders) for b in given]
        for a in given
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_earth_mover_distances_of_large_clouds():
    rng = np.random.default_rng(0)
    # On a line, the optimal assignment is between sorted points.
    line = np.zeros((2, 301, 3))
    line[..., 1] = rng.standard_normal((2, 301))
    found = earth_mover_distances(torch.from_numpy(line))[0, 1]
    assert found == pytest.approx(np.abs(np.diff(np.sort(line[..., 1]), axis=0)).mean(), rel=1e-12)
    cloud = rng.standard_normal((200, 3))
    moved = rng.permutation(cloud) + [0.3, 0, -0.4]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        pair = torch.from_numpy(np.stack([cloud, moved])).to(dtype)
        assert float(earth_mover_distances(pair)[1, 0]) == pytest.approx(0.5, rel=tolerance)
    # Products of matrices, which torch prefers above 25 points, would cancel.
    near = torch.from_numpy(np.stack([cloud, cloud + 1e-4])).float()
    expected = (near[1] - near[0]).double().norm(dim=-1).mean()
    assert float(earth_mover_distances(near)[1, 0]) == pytest.approx(float(expected), rel=1e-5)


def test_clouds_are_normalised_by_all_points_of_the_references():
    references = torch.from_numpy(clouds(5, 30, scale=3.0)) + torch.tensor([4.0, 0, -1])
    found = normalized(references, references)
    assert found.mean((0, 1)).abs().max() < 1e-12 and found.square().mean() == pytest.approx(1)
    # One factor for all axes and clouds.
    ratio = (references[:, 1:] - references[:, :1]) / (found[:, 1:] - found[:, :1])
    torch.testing.assert_close(ratio, ratio[0, 0, 0].expand_as(ratio))
    other = normalized(references[:2] + 7, references)
    torch.testing.assert_close(other, found[:2] + 7 / ratio[0, 0, 0])
    # The float32 mean of copies of one point is not exact.
    copies = torch.full((5, 7, 3), 0.1)
    with pytest.raises(ValueError, match=r'points that differ, but all are \[0.1'):
        normalized(references.float(), copies)
    assert normalized(copies, references.float()).isfinite().all()


def test_1nna_is_the_accuracy_of_a_leave_one_out_classifier():
    rng = np.random.default_rng(0)
    for shift, generated in [(0.0, 9), (1.0, 9), (5.0, 6)]:
        places = rng.normal(size=(18, 2))
        places[:generated] += shift
        gaps = np.linalg.norm(places[:, None] - places, axis=-1)
        labels = np.arange(18) < generated
        classifier = KNeighborsClassifier(1, metric='precomputed')
        expected = cross_val_score(classifier, gaps, labels, cv=LeaveOneOut()).mean()
        found = nearest_neighbor_accuracy(torch.from_numpy(gaps), generated)
        assert found == pytest.approx(expected)
    assert found == 1.0


def test_matching_and_coverage_of_known_distances():
    distances = torch.tensor([[1.0, 5.0, 9.0], [2.0, 3.0, 7.0]])  # two generated, three references
    assert minimum_matching_distance(distances) == pytest.approx((1 + 3 + 7) / 3)
    assert coverage(distances) == pytest.approx(1 / 3)


def test_the_metric_equals_a_calculation_by_hand():
    generated, truth = clouds(7, 40, seed=1), clouds(7, 40, seed=2)
    encoded = [[encode_points(cloud) for cloud in part] for part in (generated, truth)]
    pairs = [(d[None], t) for d, t in zip(*encoded, strict=True)]
    metrics = evaluate(pairs)

    # The unit is the longest edge of the bounding box, which the tokens span.
    points = [((tokens.reshape(-1, 3) + 0.5) / 256) for part in encoded for tokens in part]
    distances = torch.tensor([[chamfer(a, b) for b in points] for a in points])
    across = distances[:7, 7:]
    assert metrics == pytest.approx(
        {
            'mmd_squared_edges': across.amin(0).mean().item(),
            'coverage_percent': 100 * len(set(across.argmin(1).tolist())) / 7,
            '1nna_percent': 100 * nearest_neighbor_accuracy(distances, 7),
        },
        rel=1e-6,
    )
    given = torch.tensor(np.stack(points))
    moved = earth_mover_distances(given)
    both = evaluate(pairs, emd=True)
    assert both == pytest.approx(
        {
            **metrics,
            'mmd_emd_edges': moved[:7, 7:].amin(0).mean().item(),
            'coverage_emd_percent': 100 * coverage(moved[:7, 7:]),
            '1nna_emd_percent': 100 * nearest_neighbor_accuracy(moved, 7),
        },
        rel=1e-6,
    )
    # A common factor does not change nearest neighbours.
    deviation = float((given[7:] - given[7:].mean((0, 1))).square().mean().sqrt())
    scaled = evaluate(pairs, emd=True, normalization='set')
    assert scaled == pytest.approx(
        {
            **{name: value for name, value in both.items() if name.endswith('percent')},
            'mmd_squared_deviations': both['mmd_squared_edges'] / deviation**2,
            'mmd_emd_deviations': both['mmd_emd_edges'] / deviation,
        },
        rel=1e-4,
    )
    with pytest.raises(ValueError, match='normalization must be'):
        PointCloudDistance(normalization='shape')
    rest = [(None, truth) for _, truth in pairs[:3]]
    assert evaluate(pairs + rest, batch_size=2) == metrics


def test_a_copy_of_the_test_set_covers_it_and_noise_does_not():
    truth = [encode_points(cloud) for cloud in clouds(8, 30)]
    noise = [encode_points(cloud) for cloud in np.random.default_rng(1).uniform(size=(8, 30, 3))]
    copied = evaluate([(tokens[None], tokens) for tokens in truth])
    generated = evaluate([(d[None], t) for d, t in zip(noise, truth, strict=True)])

    assert copied == {'mmd_squared_edges': 0, 'coverage_percent': 100, '1nna_percent': 0}
    assert generated['mmd_squared_edges'] > 0 and generated['coverage_percent'] < 100
    assert generated['1nna_percent'] > 50


@pytest.mark.parametrize(('num', 'warned'), [(1, True), (19, True), (20, False)])
def test_few_clouds_give_a_warning(monkeypatch, num, warned):
    messages = []
    monkeypatch.setattr('aft_mm.evaluation.point_cloud_distance.warn', messages.append)
    tokens = [encode_points(cloud) for cloud in clouds(num, 5)]
    # Clouds without a sample do not count.
    evaluate([(one[None], one) for one in tokens] + [(None, tokens[0])] * 3)
    assert (
        messages
        == [
            f'PointCloudDistance compares only {num} generated cloud(s) with as many of the '
            'test set; results are unreliable below 20'
        ]
        * warned
    )


def test_fewer_bits_are_coarser_bins():
    tokens = np.zeros((2, 6), np.uint8)
    tokens[1] = 1  # one bin away along each axis
    pairs = [(tokens[:1], tokens[1])]
    distances = [evaluate(pairs, num_bits=bits)['mmd_squared_edges'] for bits in (8, 1)]
    assert distances == pytest.approx([2 * 3 / 256**2, 2 * 3 / 2**2])


def test_sets_of_unequal_size_are_refused_and_empty_ones_left_out():
    tokens = np.zeros(6, np.uint8)
    with pytest.raises(ValueError, match='num_samples of test_cfg must be 1, got 2'):
        evaluate([(np.stack([tokens, tokens]), tokens)])
    assert evaluate([(None, tokens), (None, tokens)]) == {}
    assert PointCloudDistance().num_bits == 8
