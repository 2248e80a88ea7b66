"""Messages of a run on the console and in the log file."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.logging import MessageHub
from torch import nn

from aft_mm.engine import BitsPerDimHook, ConsoleRunner, build_runner
from aft_mm.engine.runner import DETAILS, decayed_biases
from aft_mm.errors import UserError
from aft_mm.evaluation import Likelihood

CONFIGS = Path(__file__).parents[1] / 'configs'


@pytest.fixture
def runner(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(CONFIGS)

    def build(name, **changes):
        cfg = Config.fromfile(CONFIGS / 'tiny_without_chance.py')
        cfg.merge_from_dict(
            {
                'work_dir': str(tmp_path),
                'experiment_name': name,
                'custom_hooks': [],
                'visualizer': dict(type='Visualizer'),
                **changes,
            }
        )
        runner = build_runner(cfg)
        runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
        return runner

    return build


@pytest.mark.parametrize('level', ['INFO', 'DEBUG'])
def test_the_details_are_in_the_file_and_at_debug_on_the_console(runner, capfd, level):
    built = runner(
        f'details-{level}',
        log_level=level,
        **{'optim_wrapper.paramwise_cfg': dict(norm_decay_mult=0.0)},
    )
    assert isinstance(built, ConsoleRunner)
    console, file = capfd.readouterr().out, Path(built.logger.log_file).read_text()
    seen = [detail for detail in DETAILS[:4] if detail.strip() in console]
    assert seen == (list(DETAILS[:4]) if level == 'DEBUG' else [])
    assert all(detail.strip() in file for detail in DETAILS[:4])
    assert len(console.splitlines()) < 5 or level == 'DEBUG'


def test_a_position_bias_that_decays_is_warned_of_in_one_line(runner, capfd):
    sentence = r'WARNING - weight decay of 0.05 pulls \d+ position biases to 0, such as backbone\.'
    runner('decayed')
    assert len(re.findall(sentence, capfd.readouterr().out)) == 1
    left_alone = dict(custom_keys=dict(pos_bias=dict(decay_mult=0.0)))
    built = runner('left-alone', **{'optim_wrapper.paramwise_cfg': left_alone})
    assert 'position biases' not in capfd.readouterr().out
    assert decayed_biases(built.model, built.optim_wrapper) == ''


def test_another_runner_is_taken_where_the_config_names_one(runner):
    assert not isinstance(runner('other', runner_type='Runner'), ConsoleRunner)


def test_a_folder_that_cannot_be_written_is_refused(runner, tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(UserError, match="work_dir '.*file/work' cannot be written: Not a dir"):
        runner('nowhere', work_dir=str(tmp_path / 'file/work'))


@pytest.mark.parametrize(
    ('smoothing', 'scalars'), [(0.0, {'train/loss_bits_per_char': 3.0}), (0.1, {})]
)
def test_the_loss_is_logged_in_bits_and_nats(smoothing, scalars):
    model = nn.Module()
    model.head = SimpleNamespace(label_smoothing=smoothing)
    said = []
    hub = MessageHub.get_instance(f'bits {smoothing}')
    run = SimpleNamespace(
        model=model,
        message_hub=hub,
        logger=SimpleNamespace(info=said.append),
        val_loop=SimpleNamespace(evaluator=Evaluator([Likelihood(per='char')])),
    )
    hook = BitsPerDimHook()
    hook.before_train(run)
    hook.after_train_iter(run, 0, outputs=dict(loss=torch.tensor(3 * math.log(2))))
    found = {name: buffer.current() for name, buffer in hub.log_scalars.items()}
    assert found == pytest.approx(scalars)
    assert len(said) == len(scalars)
