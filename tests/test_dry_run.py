"""tools/benchmarks/dry_run.py: full-size samples, one run per model, and what fails."""

import math

import dry_run
import pytest

from .all_configs import ROOT, configs_of, load_config

PATHS = configs_of(*(path.parent.name for path in ROOT.glob('configs/*/metafile.yml')))
GOOD = dict(losses=[2.0, 1.0], resumed_losses=[2.0, 1.0], peak_gb=1.0, counted_gb=1.0)


@pytest.mark.parametrize(
    'name, inputs, source',
    [
        ('deit-small_8xb128-300e_in1k', (3, 224, 224), None),
        ('aft-local-256-l24-d256_8xb16-200e_cifar10', (3072,), None),
        ('aft-local-32-l24-d256_8xb16-100e_enwik8-t4096', (4096,), None),
        ('aft-local2d-hard-l32-d256_8xb16-200e_celeba-8to32', (1024, 3), (64, 3)),
        ('aft-simple-base_8xb4096-200k_wmt14-en-de', (256,), (256,)),
        ('bi-lstm-l3-h320_1xb16-100e_wsj', (2400, 40), None),
    ],
)
def test_samples_are_as_large_as_the_model_takes(name, inputs, source):
    config = load_config(PATHS[name]).copy()
    dry_run.shorten(config, 3, 'work_dir')
    arguments = dict(config.train_dataloader.dataset)
    assert arguments.pop('type') == 'aft_mm.RandomSamples'
    data = dry_run.RandomSamples(**arguments)
    sample, again = data[2], data[2]
    assert len(data) == 3 and sample['inputs'].shape == inputs
    assert (sample['inputs'] == again['inputs']).all()
    assert (sample['inputs'] != data[1]['inputs']).any()
    if source:
        assert sample['data_samples'].source.shape == source


def test_configs_of_one_model_run_once():
    names = [f'aft-local-256-l24-d256_8xb16-{n}' for n in ('1000e_shapenet-car', '200e_cifar10')]
    names.append('aft-local-256-l24-d256_8xb16-200e_shapenet-all')
    groups = dry_run.grouped([PATHS[name] for name in names])
    assert {path.stem: same for path, same in groups.items()} == {
        names[0]: [names[2]],
        names[1]: [],
    }


def test_a_small_config_trains_and_resumes():
    row = dry_run.dry_run(str(PATHS['aft-simple-mini_1xb16-6e_enwik8-t256']), 2)
    assert row['losses'][0] == pytest.approx(math.log(256), abs=1) and row['peak_gb'] > 0
    assert row['losses'][0] != row['losses'][1]
    assert dry_run.passes(row | dict(counted_gb=row['peak_gb']))


@pytest.mark.parametrize(
    'change',
    [
        {},
        dict(losses=[2.0, math.nan], resumed_losses=[2.0, math.nan]),
        dict(losses=[2.0]),
        dict(resumed_losses=[2.0, 1.01]),
        dict(peak_gb=1.9),
    ],
)
def test_what_fails(change):
    assert dry_run.passes(GOOD | change) == (not change)
