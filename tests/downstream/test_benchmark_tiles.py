"""tools/benchmarks/benchmark_tiles.py: scores, and pixels at the borders of tiles."""

import json

import benchmark_tiles
import numpy as np
import pytest
import torch
from PIL import Image

from aft_mm.apis.loading import build_model
from aft_mm.config.reading import read_config

from ..all_configs import configs_of

NAME = 'fcn-aft-conv-mini_1xb4-1200i_camvid'
CONFIG = configs_of('segmentation')[NAME]


def test_unknown_pixels_and_those_far_from_seams_do_not_count():
    found, labels = torch.randint(11, (1, 30, 40)), torch.randint(14, (1, 30, 40))
    near = torch.arange(30)[:, None].expand(30, 40) < 10
    row = benchmark_tiles.score(found, labels, 11, near)
    for key, part in (('accuracy', near | True), ('seam_accuracy', near)):
        right = (found == labels)[part & (labels < 11)].float()
        assert row[key] == pytest.approx(100 * right.mean().item())


def test_seam_mask_leaves_out_borders_of_frames():
    mask = benchmark_tiles.seam_mask((40, 60), (20, 15), 16, 2)
    rows, columns = mask[:, 0], mask[0]
    # Of the borders of tiles, column 16 is next to column 15, where a frame ends.
    assert rows.nonzero().flatten().tolist() == [14, 15, 16, 17, 30, 31, 32, 33]
    assert columns.nonzero().flatten().tolist() == [30, 31, 32, 33, 46, 47, 48, 49]


def test_a_tile_of_the_whole_image_changes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('AFT_MM_DATA', str(tmp_path))
    monkeypatch.setattr(benchmark_tiles, 'in_fresh_process', lambda call, *args: 1.0)
    rng = np.random.default_rng(0)
    for folder, shape, high in (('test', (41, 50, 3), 256), ('testannot', (41, 50), 12)):
        (tmp_path / 'camvid' / folder).mkdir(parents=True)
        suffix = 'png' if folder == 'testannot' else 'jpg'
        for i in range(5):
            pixels = rng.integers(0, high, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / 'camvid' / folder / f'{i}.{suffix}')
    torch.save(
        dict(state_dict=build_model(read_config(str(CONFIG))).state_dict()), tmp_path / 'a.pth'
    )

    words = [str(CONFIG), str(tmp_path / 'a.pth'), '--columns', '2', '--rounds', '1']
    words += ['--json', str(tmp_path / 'a.json'), '--seam', '4', '--tile']
    rows = {}
    for tile, overlap in ((100, 0), (32, 8)):
        benchmark_tiles.main([*words, str(tile), '--overlaps', str(overlap)])
        content = json.loads((tmp_path / 'a.json').read_text())
        assert content['environment']['image_size'] == '100 x 82'
        assert content['environment']['images'] == 4
        rows[tile] = [
            {k: v for k, v in x.items() if k in ('miou', 'accuracy')} for x in content['rows']
        ]
    alone, whole, tiles = rows[100]
    assert whole == tiles != alone
    assert rows[32][2] != rows[32][1] == whole
