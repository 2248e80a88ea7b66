"""`aft_mm plot explore`: values shown by the page, and rejected arguments."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image

from aft_mm.analysis.explore import ExplorerImage, ExplorerLayer, explorer_page
from aft_mm.apis import ImageClassifier

from ..chromium import CHROMIUM, Page
from ..errors import refuses, stops
from ..helpers import command

main = command('plot explore')

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason='needs Chromium')


@pytest.fixture
def picture(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / 'a<b.png')
    return tmp_path / 'a<b.png'


@pytest.fixture
def open_page(tmp_path):
    pages = []

    def open_file(path, **options):
        pages.append(Page(path, tmp_path / 'profile', **options))
        return pages[-1]

    yield open_file
    for page in pages:
        page.close()
        assert page.errors == []


def readout(page):
    text = page.run('document.getElementById("readout").textContent')
    return text, [float(number) for number in re.findall(r'= (-?[\d.e-]+)', text)]


@needs_browser
def test_the_page_shows_the_values_of_the_model(
    tiny_classifier, picture, tmp_path, open_page, capsys
):
    main([*tiny_classifier, str(picture), '--out', str(tmp_path / 'page.html')])
    assert 'wrote 2 layers and 1 images to' in capsys.readouterr().out
    page = open_page(tmp_path / 'page.html')
    assert page.run('document.title') == 'classifier'
    assert not page.run(
        "performance.getEntriesByType('resource').filter("
        "entry => !entry.name.startsWith('data:')).length"
    )

    classify = ImageClassifier(*tiny_classifier, 'cpu')
    mixer = classify.model.backbone.layers[1].token_mixer
    w = mixer.position_bias()
    keys = []
    mixer.key.register_forward_hook(lambda module, given, output: keys.append(output[0]))
    (result,) = classify(picture, progress=False)
    assert f'{result["class_name"]} {result["score"]:.2f}' in page.run(
        "document.querySelector('#image-0 h2').textContent"
    )

    # Head 2 of layer 1; tiles of 46 pixels, 6 apart, below the numbers of the heads.
    page.mouse('overview', 64 + 2 * 52 + 23, 22 + 52 + 23)
    tile = page.run('tile')
    page.mouse('query', 4.5 * tile, 1.5 * tile)  # the query in row 1, column 4
    page.mouse('query', 3.5 * tile, 2.5 * tile, click=False)
    text, numbers = readout(page)
    assert 'layer 1, head 2, query (1, 4), source (2, 3)' in text
    expected = float(w[2, 1 + 1, 2 - 1])
    assert numbers == pytest.approx([expected, np.exp(expected)], rel=1e-6)
    for _ in range(2):
        page.key('query', 'ArrowLeft', shift=True)  # three columns away: outside of the kernel
    assert 'source (2, 1): w = 0, exp(w) = 1' in readout(page)[0]
    page.key('query', 'ArrowDown')
    text, numbers = readout(page)
    assert 'query (2, 4), source (2, 4)' in text
    assert numbers[0] == pytest.approx(float(w[2, 1, 2]), rel=1e-6)
    page.key('kernel', 'ArrowUp')
    text, numbers = readout(page)
    assert 'offset (-1, 0)' in text and numbers[0] == pytest.approx(float(w[2, 0, 2]), rel=1e-6)

    page.key('overview', 'ArrowRight')  # head 3, whose keys are the fourth channel
    key = keys[0][:, 3]
    read = float(re.search(r'a<b.png: .*: key ([\d.e-]+), share', readout(page)[0]).group(1))
    assert read == pytest.approx(float(24 * key.softmax(0)[16]), rel=1e-3)  # of source (2, 4)
    page.mouse('keymap-0', 0.5 * tile, 3.5 * tile, click=False)
    text, numbers = readout(page)
    assert 'layer 1, head 3, source (3, 0)' in text
    assert numbers[-1] == pytest.approx(float(24 * key.softmax(0)[18]), rel=1e-3)
    bias = torch.zeros(4, 6)  # of the query (2, 4)
    bias[1:4, 2:6] = w[3][:, :4]
    page.mouse('share-0', 5.5 * tile, 3.5 * tile, click=False)
    share = float(re.search(r'([\d.e-]+) % of the sum', readout(page)[0]).group(1))
    assert share == pytest.approx(100 * float((key + bias.flatten()).softmax(0)[23]), rel=2e-3)


@needs_browser
def test_dense_and_causal_biases_with_a_class_token_in_both_themes(tmp_path, open_page):
    torch.manual_seed(0)
    dense, kernel = torch.randn(1, 7, 7), torch.randn(1, 3, 3)
    layers = [
        ExplorerLayer('dense', dense),
        ExplorerLayer('causal', kernel, causal=True, number=4),
        ExplorerLayer('cut', kernel, connected=False),
    ]
    (tmp_path / 'page.html').write_text(explorer_page(layers, (2, 3), 1), encoding='utf-8')
    page = open_page(tmp_path / 'page.html', dark=True)
    tile = page.run('tile')

    def pixel():  # of the first tile
        return page.run(
            "[...document.getElementById('query').getContext('2d')"
            '.getImageData(5, 5, 1, 1).data].join()'
        )

    page.mouse('query', 1.5 * tile, 0.5 * tile)  # query (0, 1)
    page.mouse('query', 2.5 * tile, 1.5 * tile, click=False)  # source (1, 2)
    assert readout(page)[1][0] == pytest.approx(float(dense[0, 1 + 1, 1 + 5]), rel=1e-6)
    names = "[...document.getElementById('layer').options].map(one => one.text).join()"
    assert page.run(names) == '0: dense,4: causal,2: cut'
    dark = page.run('getComputedStyle(document.body).backgroundColor'), pixel()
    page.run("document.getElementById('theme').click()")
    light = page.run('getComputedStyle(document.body).backgroundColor'), pixel()
    assert dark[0] == 'rgb(20, 23, 27)' and light[0] == 'rgb(255, 255, 255)'
    assert dark[1] != light[1]

    page.key('overview', 'ArrowRight')  # the later token is excluded from the sum
    page.mouse('query', 2.5 * tile, 1.5 * tile, click=False)
    assert readout(page)[0].endswith(
        'layer 4, head 0, query (0, 1), source (1, 2): not summed over'
    )
    page.key('overview', 'ArrowRight')
    page.mouse('query', 2.5 * tile, 1.5 * tile, click=False)
    assert readout(page)[1][0] == pytest.approx(float(kernel[0, 2, 2]), rel=1e-6)
    page.mouse('query', 0.5 * tile, 0.5 * tile)  # query (0, 0); the kernel is 3 x 3
    page.mouse('query', 2.5 * tile, 0.5 * tile, click=False)
    assert readout(page)[0].endswith('source (0, 2): not summed over')


@needs_browser
def test_on_a_phone_the_page_fits_and_the_readout_keeps_its_height(tmp_path, open_page):
    layers = [ExplorerLayer('a', torch.randn(8, 11, 11))]
    image = ExplorerImage('A photo with a long name.jpg', np.zeros((64, 48, 3), np.uint8), [None])
    keyed = image._replace(keys=[torch.randn(64 * 48, 8)])
    page_of = explorer_page(layers, (64, 48), images=[keyed, keyed, keyed])
    (tmp_path / 'page.html').write_text(page_of, encoding='utf-8')
    page = open_page(tmp_path / 'page.html', phone=True)
    assert page.run('document.documentElement.scrollWidth') <= 360
    for name in ('query', 'kernel', 'picture-0'):
        box = page.run(f'document.getElementById({name!r}).getBoundingClientRect().toJSON()')
        width, height = (
            page.run(f'document.getElementById({name!r}).{x}') for x in ('width', 'height')
        )
        assert box['right'] <= 360 and box['width'] / box['height'] == pytest.approx(width / height)
    heights = set()
    for x, y in ((1, 1), (100, 200)):
        page.mouse('query', x, y)
        heights.add(page.run("document.getElementById('readout').offsetHeight"))
    page.mouse('kernel', 3, 3)
    heights.add(page.run("document.getElementById('readout').offsetHeight"))
    assert len(heights) == 1 and heights.pop() < 740 / 5


def test_a_page_of_aft_conv_small_is_small():
    layers = [ExplorerLayer(str(i), torch.randn(384, 11, 11)) for i in range(12)]
    page = explorer_page(layers, (14, 14))
    assert len(page) < 4e6
    assert not re.search(r'(src|href)="|https?://|import\(|fetch\(', page)


@pytest.mark.parametrize(
    'words, message',
    [
        ('--out page.txt', "--out must end in .html, got 'page.txt'"),
        ('no.jpg --out a.html', "images must be readable images, got 'no.jpg'"),
        ('classifier.py --out a.html', "images must be readable images, got 'classifier.py'"),
    ],
)
def test_bad_arguments_give_a_one_line_message(tiny_classifier, monkeypatch, words, message):
    monkeypatch.chdir(Path(tiny_classifier[0]).parent)
    stops(message, main, [*tiny_classifier, *words.split()])
    assert not Path('a.html').exists()


def test_other_grids_are_named(tiny_classifier, untrained, picture, tmp_path):
    config = Config.fromfile(tiny_classifier[0])
    config.test_dataloader.dataset.pipeline[1].scale = (8, 12)
    config.dump(tmp_path / 'upright.py')
    out = ['--out', str(tmp_path / 'a.html')]
    words = [str(tmp_path / 'upright.py'), tiny_classifier[1], str(picture), *out]
    stops(r'must have a grid of \(4, 6\) tokens .* got \(6, 4\)', main, words)
    sequence = [*untrained['tiny_text'], *out]
    stops('^Error: the page needs position biases on one 2-d grid', main, sequence)


@pytest.mark.parametrize(
    'bias, grid, message',
    [
        (
            torch.zeros(1, 1, 1).expand(1, 5795, 5795),
            (2, 3),
            'layers must hold at most 33,554,432 numbers, got 33,582,025 in the first 1',
        ),
        (torch.zeros(1, 4, 3), (2, 3), r'bias of a must be .* got \[1, 4, 3\]'),
        (torch.full((1, 3, 3), torch.nan), (2, 3), 'the bias of a must be finite'),
    ],
)
def test_invalid_biases_are_rejected(bias, grid, message):
    refuses(message, explorer_page, [ExplorerLayer('a', bias)], grid)


def test_a_layer_may_be_called_as_a_place_of_the_page():
    layers = [ExplorerLayer('@BIASES@ @KEYS@', torch.zeros(1, 3, 3))]
    page = explorer_page(layers, (2, 3))
    assert page.count('"name": "@BIASES@ @KEYS@"') == 1
