"""Hostile checkpoint files are refused with one line; nothing is called, written or allocated."""

import http.server
import json
import multiprocessing
import os
import pickle
import re
import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.runner.checkpoint import CheckpointLoader

import aft_mm.registry  # noqa: F401  registers the loaders
from aft_mm.checkpoint import load_from_http, load_from_local, loading
from aft_mm.errors import UserError

from ..errors import refuses_input
from . import hostile

pytestmark = pytest.mark.adversarial
REFUSED = '(is refused because it asks for|is damaged or holds)'


def refused(path):
    with pytest.raises(pickle.UnpicklingError, match=REFUSED) as error:
        load_from_local(str(path))
    assert str(path) in str(error.value) and '\n' not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize('zipped', [True, False])
@pytest.mark.parametrize('name', hostile.OBJECTS)
def test_no_object_is_built_by_the_state_of_a_file(name, zipped, tmp_path):
    state = dict(state_dict={}, meta=dict(experiment_name=hostile.OBJECTS[name]()))
    torch.save(state, tmp_path / 'a.pth', _use_new_zipfile_serialization=zipped)
    refused(tmp_path / 'a.pth')


@pytest.mark.parametrize(
    ('name', 'words'),
    [
        ('train', ['--resume', 'a.pth']),
        ('test', ['a.pth']),
        ('sample', ['a.pth', '--out', 'a.txt']),
        ('publish', ['a.pth', 'out.pth']),
    ],
)
def test_tools_refuse_an_object_array_and_live(name, words, tool, config, here):
    """Stock numpy would write to an address that the file chooses."""
    state = dict(
        state_dict={}, meta=dict(experiment_name=hostile.OBJECTS['object array at an address']())
    )
    torch.save(state, 'a.pth')
    Path('text.txt').write_bytes(np.random.default_rng(0).bytes(4000))
    if name != 'publish':
        words = [config('tiny_text'), *words]
    with pytest.raises(SystemExit, match="'a.pth' is refused because it asks for numpy.") as end:
        tool(name).main(words)
    assert '\n' not in str(end.value)


PICKLES = {
    'a key that overflows the stack': hostile.nested_key(300_000),
    'lists in lists': hostile.nested_list(100_000),
    'one text many times': hostile.copies(5000),
    'a list in itself': b'\x80\x02]q\x00h\x00a.',
    'no end': b'\x80\x02}',
    'an end without a value': b'\x80\x02.',
    'a function that is a number': b'\x80\x02K\x01)R.',
    'a memo of 4 billion': b'\x80\x02}r\xff\xff\xff\xff.',
    'an opcode of later protocols': b'\x80\x04\x8c\x01a\x94.',
}


def read_all(paths, report):
    resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    messages = []
    for path in paths:
        try:
            messages.append(str(load_from_local(str(path))))
        except pickle.UnpicklingError as error:
            messages.append(str(error))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    report.write_text(json.dumps([messages, used]))


def test_a_pickle_takes_no_more_than_its_file_allows(tmp_path):
    paths = [tmp_path / f'{i}.pth' for i in range(len(PICKLES))]
    for path, data in zip(paths, PICKLES.values(), strict=True):
        hostile.save_pickle(path, data)
    report = tmp_path / 'report'
    child = multiprocessing.get_context('fork').Process(target=read_all, args=(paths, report))
    child.start()
    child.join()
    assert child.exitcode == 0
    messages, kilobytes = json.loads(report.read_text())
    for name, message in zip(PICKLES, messages, strict=True):
        assert message == '{}' if 'memo' in name else re.search(REFUSED, message), name
    assert kilobytes < 200_000


def test_weights_that_claim_more_than_the_file_holds_are_refused(tmp_path):
    hostile.save_views(tmp_path / 'views.pth', 100)
    assert 'many times the memory' in refused(tmp_path / 'views.pth')
    hostile.save_expanded(tmp_path / 'expanded.pth')
    assert 'many times the memory' in refused(tmp_path / 'expanded.pth')
    hostile.save_views(tmp_path / 'tied.pth', 3)
    assert len(load_from_local(str(tmp_path / 'tied.pth'))['state_dict']) == 3
    hostile.recompressed(tmp_path / 'tied.pth', tmp_path / 'bomb.pth')
    assert 'compressed' in refused(tmp_path / 'bomb.pth')


@pytest.mark.parametrize('zipped', [True, False])
def test_every_flipped_bit_of_a_weight_is_found(zipped, tmp_path):
    weight, path = torch.randn(50), tmp_path / 'a.pth'
    state = dict(state_dict=dict(weight=weight))
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    data = bytearray(path.read_bytes())
    data[data.find(weight.numpy().tobytes()) + 101] ^= 1
    path.write_bytes(data)
    if zipped:
        assert 'Bad CRC-32' in refused(path)
    else:  # the old format has no checksums
        loaded = load_from_local(str(path))['state_dict']['weight']
        assert (loaded != weight).sum() == 1


def test_a_file_that_is_cut_or_overwritten_anywhere_is_refused_or_whole(tmp_path):
    whole = dict(state_dict=dict(weight=torch.randn(9, 9)), meta=dict(epoch=1, names=['a', 'b']))
    torch.save(whole, tmp_path / 'a.pth')
    data = (tmp_path / 'a.pth').read_bytes()
    rng = np.random.default_rng(0)
    same = 0
    for trial in range(150):
        damaged = bytearray(data)
        at = int(rng.integers(len(data)))
        if trial % 3 == 0:
            damaged = damaged[:at]
        elif trial % 3 == 1:
            damaged[at] ^= 1 << int(rng.integers(8))
        else:
            damaged[at : at + 16] = rng.bytes(16)
        (tmp_path / 'b.pth').write_bytes(damaged)
        try:
            loaded = load_from_local(str(tmp_path / 'b.pth'))
        except pickle.UnpicklingError as error:
            assert '\n' not in str(error)
        else:  # what fills the gaps of the archive is read by nobody
            assert torch.equal(loaded['state_dict']['weight'], whole['state_dict']['weight'])
            assert loaded['meta'] == whole['meta']
            same += 1
    assert same < 100


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server that sends blocks of bytes until the connection closes; the paths asked for."""
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'hub'))
    answers, asked, ended = {}, [], threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802 - the base class calls it so
            asked.append(self.path)
            try:
                for block in answers[self.path]():
                    if ended.is_set():
                        return
                    self.wfile.write(block)
                    self.wfile.flush()
            except OSError:
                pass

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as httpd:
        httpd.daemon_threads = True
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield answers, asked, f'http://127.0.0.1:{httpd.server_port}'
        ended.set()
        httpd.shutdown()


OK = b'HTTP/1.0 200 OK\r\n'


def file(data, announced=None):
    length = len(data) if announced is None else announced
    return lambda: [OK + f'Content-Length: {length}\r\n\r\n'.encode(), data]


def weights(value, path):
    torch.save(dict(state_dict=dict(weight=torch.full((3,), value))), path)
    return path.read_bytes()


def test_a_download_is_that_of_its_address_and_is_kept(server, tmp_path):
    answers, asked, host = server
    for value, path in enumerate(('/a/epoch_1.pth', '/b/epoch_1.pth')):
        answers[path] = file(weights(float(value), tmp_path / 'w.pth'))
    for _ in range(2):
        for value, path in enumerate(answers):
            loaded = load_from_http(host + path)['state_dict']['weight']
            assert loaded.tolist() == 3 * [value]
    assert asked == list(answers)


def test_a_download_that_is_cut_damaged_or_of_another_hash_leaves_nothing(server, tmp_path):
    answers, asked, host = server
    data = weights(1.0, tmp_path / 'w.pth')
    length = len(data)
    for path, answer, error, why in (
        (
            '/cut.pth',
            file(data[: length // 2], length),
            UserError,
            f'cannot be downloaded: .*{length // 2} of {length} bytes received',
        ),
        ('/a-0123abcd.pth', file(data), UserError, 'refused: .*but the address says 0123abcd'),
        ('/a.pth', file(data[:100] + bytes(length - 100)), pickle.UnpicklingError, 'is damaged'),
    ):
        answers[path] = answer
        with pytest.raises(error, match=f'{path[1:]}. .*{why}'):
            load_from_http(host + path)
        assert not list((tmp_path / 'hub').rglob('*.p*'))
    for path in ('/cut.pth', '/a.pth'):
        answers[path] = file(data)
        assert load_from_http(host + path)['state_dict']['weight'].tolist() == [1, 1, 1]


# Servers that never end, or are none.


def endless(*start, block=bytes(2**20), pause=0.0):
    def answer():
        yield from start
        while True:
            yield block
            time.sleep(pause)

    return answer


SLOW = dict(block=b'a', pause=0.05)
CHUNKS = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n'
LONG, LATE = 'more than 5,000,000 bytes', 'takes more than 1 seconds'
ENDLESS = {
    'bytes without a length': (endless(OK + b'\r\n'), LONG),
    'bytes beyond their length': (endless(OK + b'Content-Length: 100000000000\r\n\r\n'), LONG),
    'slow content': (endless(OK + b'\r\n', **SLOW), LATE),
    'slow headers': (endless(OK, **SLOW), LATE),
    'slow chunks': (endless(CHUNKS, **SLOW), LATE),
    'silence': (endless(block=b'', pause=0.1), LATE),
    'a length that is text': (file(b'a', 'all'), "Length is 'all'"),
    'a negative length': (file(b'a', -5), "Length is '-5'"),
    'no http': (lambda: [b'SSH-2.0-OpenSSH\r\n\r\n'], 'SSH'),
    'nothing': (lambda: [], ''),
}


@pytest.mark.parametrize('name', ENDLESS)
def test_a_download_that_would_not_end_leaves_nothing(name, server, tmp_path, monkeypatch):
    answers, asked, host = server
    answers['/a.pth'], message = ENDLESS[name]
    monkeypatch.setenv('AFT_MM_DOWNLOAD_BYTES', '5000000')
    monkeypatch.setenv('AFT_MM_DOWNLOAD_SECONDS', '1')
    with pytest.raises(UserError, match=f"'{host}/a.pth' cannot be downloaded: ") as error:
        load_from_http(f'{host}/a.pth')
    assert message in str(error.value) and '\n' not in str(error.value)
    assert not [path for path in (tmp_path / 'hub').rglob('*') if path.is_file()]


@pytest.mark.parametrize('target', ['ftp://127.0.0.1:9/a.pth', 'file:///etc/passwd'])
def test_a_redirect_stays_on_http(target, server, tmp_path):
    answers, asked, host = server
    answers['/a.pth'] = lambda: [f'HTTP/1.0 302 Found\r\nLocation: {target}\r\n\r\n'.encode()]
    with pytest.raises(UserError, match=f"a.pth' cannot be downloaded: .*edirect.* '{target}'"):
        load_from_http(f'{host}/a.pth')
    answers['/b.pth'] = lambda: [b'HTTP/1.0 302 Found\r\nLocation: /w.pth\r\n\r\n']
    answers['/w.pth'] = file(weights(1.0, tmp_path / 'w.pth'))
    assert load_from_http(f'{host}/b.pth')['state_dict']['weight'].tolist() == [1, 1, 1]
    assert len(list((tmp_path / 'hub').rglob('*.pth'))) == 1


def test_names_of_torchvision_and_of_hosts_that_are_gone(server, tmp_path, monkeypatch):
    answers, asked, host = server
    answers['/a.pth'] = file(weights(1.0, tmp_path / 'w.pth'))
    monkeypatch.setattr(loading, 'get_torchvision_models', lambda: {'tiny': f'{host}/a.pth'})
    load = CheckpointLoader.load_checkpoint
    assert load('torchvision://tiny', 'cpu')['state_dict']['weight'].tolist() == [1, 1, 1]
    message = "'modelzoo://tiny2' is not one of torchvision$"
    refuses_input(message, load, 'modelzoo://tiny2', 'cpu')
    for scheme in ('open-mmlab', 'openmmlab', 'mmcls'):
        message = f"'{scheme}://tiny' is on a host that no longer exists; give a file or"
        refuses_input(message, load, f'{scheme}://tiny', 'cpu')


def test_a_killed_download_leaves_nothing(server, tmp_path):
    answers, asked, host = server
    reached = threading.Event()

    def half():
        yield OK + b'Content-Length: 5000000\r\n\r\n'
        yield bytes(3 * 10**6)
        reached.set()
        time.sleep(60)

    answers['/a.pth'] = half
    child = multiprocessing.get_context('fork').Process(
        target=load_from_http, args=(f'{host}/a.pth',)
    )
    child.start()
    assert reached.wait(60)
    child.kill()
    child.join()
    assert not [path for path in (tmp_path / 'hub').rglob('*') if path.is_file()]


def test_progress_is_shown_on_a_terminal(server, tmp_path, monkeypatch, capsys):
    answers, asked, host = server
    answers['/a.pth'] = answers['/b.pth'] = file(weights(1.0, tmp_path / 'w.pth'))
    load_from_http(f'{host}/a.pth')
    assert not capsys.readouterr().err
    monkeypatch.setenv('FORCE_COLOR', '1')
    load_from_http(f'{host}/b.pth')
    assert re.search('downloading.*100%', capsys.readouterr().err)


@pytest.mark.parametrize(
    'address',
    [
        'http://',
        'http://[::1',
        'http://127.0.0.1:port/a.pth',
        'http://127.0.0.1:9/a.pth',
        'http://127.0.0.1:99999/a.pth',
        'http://a b/c.pth',
        'http://\x00/a.pth',
        'http://é\udc80/a.pth',
        'http://' + 300 * 'a' + '/a.pth',
        'http://..../a.pth',
        'http:///a.pth',
        'file:///etc/passwd',
    ],
)
def test_addresses_that_are_none(address, tmp_path, monkeypatch):
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'hub'))
    with pytest.raises(UserError, match='(cannot be downloaded: .|must be an http)') as error:
        load_from_http(address)
    assert repr(address)[:200] in str(error.value) and '\n' not in str(error.value)
    assert not [path for path in (tmp_path / 'hub').rglob('*') if path.is_file()]


def test_bounds_of_downloads_are_numbers(server, monkeypatch):
    for name in ('AFT_MM_DOWNLOAD_BYTES', 'AFT_MM_DOWNLOAD_SECONDS'):
        with monkeypatch.context() as context:
            context.setenv(name, '1e9')
            with pytest.raises(UserError, match=f"{name} must be an int, 1 or larger, got '1e9'"):
                load_from_http(f'{server[2]}/a.pth')


def test_parts_of_killed_downloads_are_removed(server, tmp_path):
    answers, asked, host = server
    answers['/a.pth'] = file(weights(1.0, tmp_path / 'w.pth'))
    load_from_http(f'{host}/a.pth')
    (path,) = (tmp_path / 'hub').rglob('*.pth')
    path.unlink()
    parts = [path.with_name(f'.{path.name}.{number}.part') for number in (5, 6)]
    for part in parts:
        part.write_bytes(b'half')
    os.utime(parts[0], (0, 0))
    load_from_http(f'{host}/a.pth')
    assert [part.exists() for part in parts] == [False, True]  # another process may write the other


@pytest.mark.parametrize(
    ('state', 'message'),
    [
        (None, 'holds a NoneType as state_dict instead of tensors by name'),
        (dict(weight='text'), 'holds a str in state_dict instead of the tensor weight'),
        ({5: torch.zeros(1)}, 'holds a tensor in state_dict whose name is a int'),
    ],
)
@pytest.mark.parametrize('words', [['train', '--resume'], ['test']])
def test_weights_that_are_no_tensors(state, message, words, tool, config, here):
    torch.save(dict(state_dict=state, meta={}), 'a.pth')
    Path('text.txt').write_bytes(np.random.default_rng(0).bytes(4000))
    with pytest.raises(SystemExit, match=f"Error: checkpoint 'a.pth' {message}$"):
        tool(words[0]).main([config('tiny_text'), *words[1:], 'a.pth'])
