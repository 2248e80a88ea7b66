"""The page of `aft_mm demo`, through a client and in a browser."""

import shutil
import subprocess
from contextlib import contextmanager
from importlib.util import find_spec
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image

from aft_mm.analysis import demo
from aft_mm.apis import ImageClassifier
from aft_mm.apis.loading import load_model
from aft_mm.images import enlarge_bicubic, read_image

from ..errors import stops
from ..helpers import command
from ..test_documents import ROOT, pack

needs_gradio = pytest.mark.skipif(find_spec('gradio') is None, reason='gradio is not installed')
BROWSER = next(filter(None, map(shutil.which, ['chromium', 'google-chrome'])), None)


@contextmanager
def opened(folder, name):
    config = str(ROOT / f'tests/configs/{name}.py')
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / 'tests/configs')
        _, model = load_model(config, None, 'cpu')
        torch.save(dict(state_dict=model.state_dict(), meta={}), folder / 'checkpoint.pth')
        page = demo.make_page(config, str(folder / 'checkpoint.pth'))
    try:
        yield demo.launch(page, prevent_thread_lock=True, quiet=True)
    finally:
        page.close()


def call(address, *inputs):
    from gradio_client import Client

    return Client(address, verbose=False).predict(*inputs, api_name='/run')


@needs_gradio
def test_a_text_is_continued(tmp_path):
    with opened(tmp_path, 'tiny_text') as address:
        text = call(address, 'ab', 10, 0.8, 0)
        assert text.startswith('ab') and text == call(address, 'ab', 10, 0.8, 0)
        assert text != call(address, 'ab', 10, 0.8, 1)
        with pytest.raises(Exception, match='the text must be shorter than 32 bytes, got 60'):
            call(address, 'a' * 60, 10, 0.8, 0)


def test_a_page_of_several_labels_shows_the_accepted_ones(tiny_classifier, multi_label, tmp_path):
    Image.fromarray(np.full((8, 12, 3), 90, np.uint8)).save(tmp_path / 'a.png')
    found = []
    for thr in (0, 0.5, 1):
        files = multi_label(*tiny_classifier, thr=thr)
        (result,) = ImageClassifier(*files, 'cpu')(tmp_path / 'a.png', progress=False)
        names, scores = result['class_names'], result['scores'][result['labels']].tolist()
        found.append(demo.classify(MagicMock(), *files)['fn'](str(tmp_path / 'a.png'))[0])
        assert found[-1] == (dict(zip(names, scores, strict=True)) or 'no label')
    assert len(found[0]) == 5 and 0 < len(found[1]) < 5 and found[2] == 'no label'


@needs_gradio
def test_the_top_of_a_picture_is_kept(tmp_path):
    from gradio_client import handle_file

    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / 'a.png')
    with opened(tmp_path, 'tiny_pixels') as address:
        file = call(address, handle_file(tmp_path / 'a.png'), 0.5, 0)
        found = np.asarray(Image.open(file).convert('L'))
        assert (found[:4] == pixels[:4]).all() and (found[4:] != pixels[4:]).any()
        sampled = np.asarray(Image.open(call(address, None, 0.5, 0)).convert('L'))
        assert sampled.shape == (8, 8)


@needs_gradio
def test_a_classifier_shows_classes_and_keys(tmp_path):
    from gradio_client import handle_file

    Image.fromarray(np.full((20, 24, 3), 90, np.uint8)).save(tmp_path / 'a.png')
    with opened(tmp_path, 'tiny') as address:
        classes, keys = call(address, handle_file(tmp_path / 'a.png'))
        scores = [entry['confidence'] for entry in classes['confidences']]
        assert scores == sorted(scores, reverse=True) and 0 < sum(scores) <= 1.001
        assert 'image/' in keys['plot'][:20]
        with pytest.raises(Exception, match='an image must be given, got none'):
            call(address, None)
        if BROWSER is None:
            pytest.skip('there is no chromium for the page itself; its functions passed')
        page = subprocess.run(
            [BROWSER, '--headless', '--no-sandbox', '--virtual-time-budget=20000', '--dump-dom']
            + [f'--user-data-dir={tmp_path / "browser"}', address],
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout
        assert 'aft_mm: tiny' in page and 'picture' in page and 'Submit' in page


@needs_gradio
def test_a_large_picture_is_scaled_to_the_size_of_the_model(tmp_path, monkeypatch):
    from gradio_client import handle_file

    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / 'a.png')
    with opened(tmp_path, 'tiny') as address:
        classes, _ = call(address, handle_file(tmp_path / 'a.png'))
        classify = ImageClassifier(str(ROOT / 'tests/configs/tiny.py'), tmp_path / 'checkpoint.pth')
        small = enlarge_bicubic(read_image(tmp_path / 'a.png', 1)[0], (8, 8))
        (expected,) = classify([small])
        found = {entry['label']: entry['confidence'] for entry in classes['confidences']}
        for label, score in found.items():
            assert score == pytest.approx(expected['scores'][int(label)], abs=1e-6)
        monkeypatch.setattr(demo, 'MOST_PIXELS', 300 * 400 - 1)
        with pytest.raises(Exception, match='at most 119,999 pixels, got 400 x 300'):
            call(address, handle_file(tmp_path / 'a.png'))
        for name, content in (
            ('text', b'no picture'),
            ('cut', (tmp_path / 'a.png').read_bytes()[:999]),
        ):
            (tmp_path / f'{name}.png').write_bytes(content)
            with pytest.raises(Exception, match=f'{name}.png.* cannot be read'):
                call(address, handle_file(tmp_path / f'{name}.png'))


@needs_gradio
def test_requests_of_other_sites_and_large_files_are_refused(tmp_path, monkeypatch):
    import httpx

    monkeypatch.setattr(demo, 'MOST_BYTES', 1000)
    with opened(tmp_path, 'tiny_text') as address:
        own = address.rstrip('/')
        port = own.rpartition(':')[2]
        for headers, status in (
            ({}, 200),
            ({'Origin': own}, 200),
            ({'Host': f'localhost:{port}', 'Origin': f'http://localhost:{port}'}, 200),
            ({'Origin': 'http://evil.example'}, 403),
            ({'Origin': 'null'}, 403),
            ({'Origin': 'http://127.0.0.1:1'}, 403),
            ({'Host': f'evil.example:{port}'}, 403),
            ({'Host': f'evil.example:{port}', 'Origin': f'http://evil.example:{port}'}, 403),
            ({'Host': '127.0.0.1.evil.example'}, 403),
        ):
            assert httpx.get(address, headers=headers).status_code == status, headers
            files = {'files': ('a.txt', b'text')}
            sent = httpx.post(f'{own}/gradio_api/upload', headers=headers, files=files)
            assert sent.status_code == status, headers
        sent = httpx.post(f'{own}/gradio_api/upload', files={'files': ('a.txt', b'0' * 1001)})
        assert sent.status_code == 413


def test_models_without_a_page_and_a_missing_gradio_are_refused(tmp_path, monkeypatch):
    pack(tmp_path, 'tiny_super_resolution')
    files = [str(tmp_path / name) for name in ('config.py', 'checkpoint.pth')]
    stops('must be for ImageClassifier, .*, got SuperResolver', command('demo'), files)
    pack(tmp_path, 'tiny_text')
    monkeypatch.setattr(demo.importlib.util, 'find_spec', lambda name: None)
    stops('the demo needs gradio: pip install', command('demo'), files)
    stops("'none.pth' does not exist", command('demo'), [files[0], 'none.pth'])
