"""The history of the speed of ops: what is compared, refused and shown."""

import json

import pytest
import speed_history
import table_pages
import torch
from speed_history import CASES, KEPT, MODES, losses, main

NAMES = [f'{op} {mode}' for op in CASES for mode in MODES]


@pytest.mark.parametrize(
    'known, value, times',
    [
        ((), 100.0, None),
        ((1.0,), 1.09, None),
        ((1.0,), 1.11, 1.11),
        ((1.0, 1.0, 1.0, 1.05, 1.0), 1.11, 1.11),
        ((1.0, 1.0, 1.0, 1.3, 1.0), 1.2, None),  # as slow as a noisy night
        ((1.3, 1.0, 1.0, 1.0, 1.0, 1.0), 1.2, 1.2),  # of which the last five count
        ((1.0, 2.0, 3.0, 4.0, 5.0), 6.0, 2.0),
    ],
)
def test_a_loss_is_over_the_usual_ratio_and_over_the_noise(known, value, times):
    earlier = [dict(ratios=dict(a=ratio)) for ratio in known]
    assert losses(dict(a=value, new=9.0), earlier) == ({} if times is None else {'a': times})


@pytest.mark.parametrize(
    'measured, status, kept',
    [([1.0], 0, 1.0), ([0.5], 0, 0.5), ([1.2, 1.0], 0, 1.0), ([1.2, 1.15], 1, 1.15)],
)
def test_a_line_is_appended_and_a_loss_measured_twice(
    measured, status, kept, tmp_path, monkeypatch, capsys
):
    measured = iter(measured)
    monkeypatch.setattr(speed_history, 'measure', lambda *_: dict.fromkeys(NAMES, next(measured)))
    monkeypatch.setattr(speed_history, 'set_up_torch', lambda args: None)
    setting = dict(device=speed_history.device_name('cpu'), threads=1, torch=str(torch.__version__))
    lines = [
        dict(name=str(n), commit='c', **setting, ratios=dict.fromkeys(NAMES, 1.0))
        for n in range(KEPT)
    ]
    # Faster, elsewhere.
    lines[-1] |= dict(device='another', ratios=dict.fromkeys(NAMES, 0.1))
    path = tmp_path / 'speed.jsonl'
    path.write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
    assert main(['--json', str(path)]) == status
    *before, last = map(json.loads, path.read_text().splitlines())
    assert before == lines[1:]
    assert setting.items() <= last.items() and last['ratios'] == dict.fromkeys(NAMES, kept)
    assert capsys.readouterr().err.count('times its usual ratio') == 12 * status
    assert next(measured, None) is None


def test_ratios_of_ops_are_measured(monkeypatch):
    args = speed_history.common_parser('a test').parse_args(['--rounds', '1', '--device', 'cpu'])
    monkeypatch.setattr(speed_history, 'CASES', {'aft_conv': CASES['aft_conv']})
    ratios = speed_history.measure(['aft_conv'], args)
    assert ratios.keys() == {'aft_conv forward', 'aft_conv forward+backward'}
    assert all(0 < value < 1000 for value in ratios.values())
    monkeypatch.setattr(speed_history.Oracle, 'errors', lambda *_: dict(output=1.0))
    with pytest.raises(SystemExit, match='output of aft_conv is wrong by 1.00e[+]00 > .*not timed'):
        speed_history.measure(['aft_conv'], args)


def test_the_page_shows_lines_of_one_setting():
    lines = [json.loads(line) for line in table_pages.SPEED.read_text().splitlines()]
    assert all(list(line['ratios']) == NAMES for line in lines)
    setting = dict(device='d', threads=1, torch='t')
    made = [
        dict(name=f'2026-01-0{n}T00', **setting, ratios={'x forward': float(n)}) for n in (1, 3, 2)
    ]
    other = dict(name='2026-01-01T00', **setting | dict(torch='u'), ratios={'x forward': 9.0})
    page = table_pages.speed([other, *made])
    assert page.splitlines()[-1] == '| x forward | 1 | 2 | 1 to 3 | ▁█▅ |'
    assert '▁▁' in table_pages.speed([made[0], made[0]])
