"""docs/tables/: pages follow from their sources, and name what there is."""

import json
import re
import sys

import config_tables
import pytest
import table_pages
import yaml

from ..helpers import ROOT

FACTS = yaml.safe_load((ROOT / 'docs/tables/tables.yml').read_text(encoding='utf-8'))
every_page = pytest.mark.parametrize('page', FACTS['pages'], ids=lambda page: page['page'])


def test_the_pages_are_written_from_their_sources(tmp_path, monkeypatch):
    (tmp_path / 'tables.yml').write_bytes((table_pages.FOLDER / 'tables.yml').read_bytes())
    monkeypatch.setattr(table_pages, 'FOLDER', tmp_path)
    monkeypatch.setattr(sys, 'argv', ['table_pages.py'])
    table_pages.main()
    names = {'index', 'licences', 'speed', *(page['page'] for page in FACTS['pages'])}
    assert {path.stem for path in tmp_path.glob('*.md')} == names
    page = tmp_path / 'arxiv-table-2.md'
    before = page.read_text(encoding='utf-8')
    assert '| 2.74 |' in before
    page.write_text(before.replace('2.74', '2.73'), encoding='utf-8')
    table_pages.main()
    assert page.read_text(encoding='utf-8') == before


def test_every_table_of_the_papers_with_a_config_has_a_page():
    tables = {
        name
        for path in ROOT.glob('configs/*/metafile.yml')
        for name in config_tables.read_metafile(path.parent)['Tables']
        if re.fullmatch(r'[AIL] table \d+', name)
    }
    assert tables <= {page['table'] for page in FACTS['pages']}


@every_page
def test_every_row_has_its_memory_and_fits_a_card_of_32_gb(page):
    memory = json.loads(table_pages.MEMORY.read_text(encoding='utf-8'))
    metafile = config_tables.read_metafile(ROOT / 'configs' / page['task'])
    for first, _ in config_tables.rows(metafile, page['table']):
        if link := re.search(r'\]\((.+)\.py\)', first):
            text = table_pages.memory_gb(link[1], memory, page.get('batch'))
            assert float(text.split(',')[0]) < 25.6, link[1]


def test_hours_are_those_of_the_paper_or_flops_over_the_rate():
    facts, entries = dict(samples=10**9, tokens=100, rate=1), dict(Parameters=str(10**9))
    flops = 6 * 12 * 2 * 64**2 * 1e9 * 100 * 3
    expected = f'{flops / 8e12 / 3600:.0f}'
    assert table_pages.hours('x-l2-d64_8xb4-3e_y', entries, facts, False) == expected != '0'
    assert table_pages.hours('x-l2-d64_8xb4-7d_y', entries, facts, False) == '–'
    # Table 2 of arXiv 2105.14103: 200 epochs of 50,000 images in batches of 32 at 1.68 iterations/s.
    facts = dict(samples=50_000, tokens=3072, rate=1, paper_batch=32)
    entries[table_pages.PAPER_RATE] = '1.68'
    hours = table_pages.hours('aft-l12-d512_8xb16-200e_cifar10', entries, facts, True)
    assert hours == f'{200 * 50_000 / 32 / 1.68 / 3600:.0f} (paper)' == '52 (paper)'


def test_counted_memory_and_recomputation_are_those_of_the_config():
    memory = json.loads(table_pages.MEMORY.read_text(encoding='utf-8'))
    for name in (
        'aft-simple-l24-d256_8xb16-200e_cifar10',
        'transformer-l8-d256-h8_1xb10-250e-logistic_mnist',
    ):
        found, stored = table_pages.count(ROOT / f'configs/image_ar/{name}.py'), memory[name]
        assert found.pop('saved') == pytest.approx(stored['saved'], rel=0.1)
        assert found.pop('recomputed') == pytest.approx(stored['recomputed'], rel=0.1)
        assert found == {key: stored[key] for key in found}


@pytest.mark.parametrize('name', ['mnist', 'imagenet', 'celeba'])
def test_checksums_are_those_of_torchvision(name):
    from torchvision.datasets import MNIST, CelebA, imagenet

    theirs = dict(
        mnist=dict(MNIST.resources),
        imagenet={file: md5 for file, md5 in imagenet.ARCHIVE_META.values()},
        celeba={file: md5 for _, md5, file in CelebA.file_list},
    )[name]
    ours = re.findall(r'([0-9a-f]{32})  ([\w.-]+)', FACTS['data'][name])
    assert ours and {(theirs[file], file) for _, file in ours} == set(ours)
