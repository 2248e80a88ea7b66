"""Lines of a run on the console, made from those that mmengine logs."""

from types import SimpleNamespace

import pytest
from mmengine.logging import HistoryBuffer, MessageHub, MMLogger
from mmengine.runner import LogProcessor

from aft_mm.engine.console import readable, shorten_console


def lines_of(by_epoch, name, **values):
    """Return the lines of mmengine's LogProcessor for training, validation and test."""
    hub = MessageHub.get_instance(name)
    for key, value in values.items():
        hub.log_scalars[key.replace('__', '/', 1)] = HistoryBuffer([value], [1])
    hub.update_info('eta', 3725)
    loader = type('Loader', (), dict(__len__=lambda self: 120))()
    loop = SimpleNamespace(dataloader=loader, max_epochs=12)
    runner = SimpleNamespace(
        message_hub=hub,
        iter=19,
        epoch=2,
        max_epochs=12,
        max_iters=1200,
        _train_loop=loop,
        train_loop=loop,
        train_dataloader=loader,
        val_dataloader=loader,
        test_dataloader=loader,
        val_loop=loop,
        test_loop=loop,
        model=None,
    )
    processor = LogProcessor(by_epoch=by_epoch)
    return (
        processor.get_log_after_iter(runner, 19, 'train')[1],
        processor.get_log_after_iter(runner, 19, 'val')[1],
        processor.get_log_after_epoch(runner, 120, 'val')[1],
        processor.get_log_after_epoch(runner, 120, 'test')[1],
    )


VALUES = {
    'train__lr': 1e-5,  # of the first layer
    'train__base_lr': 1e-3,
    'train__time': 0.25,
    'train__data_time': 0.125,
    'train__loss': 1.5,
    'train__decode.loss_ce': 1.0,
    'val__time': 0.5,
    'val__data_time': 0.1,
    'val__coco/cell phone_precision': 0.25,
    'test__accuracy/top1': 97.5,
    'test__time': 0.5,
}


@pytest.mark.parametrize(
    ('by_epoch', 'head', 'validation'),
    [(True, 'epoch  3,  20/120', 'epoch 2, '), (False, 'iteration   20/1200', '')],
)
def test_the_lines_of_mmengine_become_words(by_epoch, head, validation):
    training, during, result, test = map(readable, lines_of(by_epoch, str(by_epoch), **VALUES))
    assert training == (
        f'{head}   loss 1.5000   rate 0.001   0.25 s per step   1:02:05 left   '
        'decode.loss_ce 1.0000'
    )
    during = ' '.join(during.split())
    assert during == f'{validation}validation 20/120 0.5 s per step 1:02:05 left'
    assert result == f'{validation}validation   coco/cell phone_precision 0.2500'
    assert test == 'test   accuracy/top1 97.5000'


@pytest.mark.parametrize(
    'message',
    ['Epoch(val) [3][5/5]    counts: [[1  2]]', 'Epoch(train) [3] took 5.1 s', 'a: b', ''],
)
def test_other_messages_stay(message):
    assert readable(message) == message


def test_the_console_has_no_date_and_the_file_has(tmp_path, capfd):
    file = tmp_path / 'run.log'
    for level in ('INFO', 'DEBUG'):
        logger = MMLogger(f'short {level}', log_file=str(file), log_level=level)
        shorten_console(logger)
        for _ in range(2):
            logger.warning('weights decay')
        logger.info('Epoch(val) [3][8/8]    mIoU: 12.5000  data_time: 0.1  time: 0.2')
        logger.error('no metric')
        logger.info('Exp name: tiny')
        shown, text = capfd.readouterr().out.splitlines(), file.read_text()
        assert text.count('mmengine - WARNING - weights decay') == 1
        assert 'Epoch(val) [3][8/8]    mIoU: 12.5000' in text and 'Exp name' in text
        if level == 'DEBUG':
            assert len(shown) == 4 and all(' - mmengine - ' in line for line in shown)
            continue
        assert [line.rpartition(' - ')[2] for line in shown] == [
            'weights decay',
            'epoch 3, validation   mIoU 12.5000',
            'no metric',
        ]
        assert not any('mmengine' in line or '/' in line for line in shown)
