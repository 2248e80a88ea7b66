"""``aft_mm convert average``."""

import resource
from pathlib import Path

import pytest
import torch

from aft_mm.checkpoint import average, averaged, load_from_local
from aft_mm.errors import UserError
from aft_mm.layers import PerformerAttention

from ..errors import stops
from ..helpers import command

average_files = command('convert average')
publish = command('publish')


def save(path, seed, width=3):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, 2), torch.nn.BatchNorm1d(2))
    model[1].num_batches_tracked += seed
    meta = dict(epoch=seed, iter=100 * seed)
    torch.save(dict(state_dict=model.state_dict(), meta=meta, optimizer={}), path)
    return model


def test_the_average_is_the_mean_and_gives_another_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    models = [save(f'epoch_{seed}.pth', seed) for seed in (9, 10, 11)]
    # In the order of `epoch_*.pth`.
    average_files(['epoch_10.pth', 'epoch_11.pth', 'epoch_9.pth', '--out', 'mean.pth'])

    averaged = load_from_local('mean.pth', 'cpu')
    expected = torch.stack([model[0].weight for model in models]).mean(0)
    torch.testing.assert_close(averaged['state_dict']['0.weight'], expected)
    assert averaged['state_dict']['0.weight'].dtype == torch.float32
    assert averaged['state_dict']['1.num_batches_tracked'] == 11
    meta = dict(epoch=11, iter=1100, averaged=3)
    assert averaged['meta'] == meta and 'optimizer' not in averaged
    x = torch.randn(4, 3)
    with torch.no_grad():
        outputs = [model.eval()(x) for model in models]
        models[0].load_state_dict(averaged['state_dict'])
        assert all((models[0](x) - output).abs().max() > 1e-3 for output in outputs)


def test_random_features_are_those_of_the_last_checkpoint(tmp_path):
    torch.manual_seed(0)
    mixers = [PerformerAttention(6, num_heads=2) for _ in range(2)]
    paths = [str(tmp_path / '1.pth'), str(tmp_path / '2.pth')]
    for prefix in ('', 'layers.0.token_mixer.'):
        for path, mixer in zip(paths, mixers, strict=True):
            torch.save(dict(state_dict=mixer.state_dict(prefix=prefix)), path)
        mean = average(paths)['state_dict']
        assert torch.equal(mean[f'{prefix}projection'], mixers[1].projection)
        expected = (mixers[0].proj.weight + mixers[1].proj.weight) / 2
        torch.testing.assert_close(mean[f'{prefix}proj.weight'], expected)


def test_the_option_averages_the_checkpoints_up_to_the_given_one(tmp_path):
    models = [save(tmp_path / f'epoch_{seed}.pth', seed) for seed in (8, 9, 10, 11)]
    save(tmp_path / 'iter_9.pth', 3)
    with averaged(str(tmp_path / 'epoch_10.pth'), 2) as path:
        mean = load_from_local(path, 'cpu')
    assert not Path(path).exists() and mean['meta'] == dict(epoch=10, iter=1000, averaged=2)
    expected = (models[1][0].weight + models[2][0].weight) / 2
    torch.testing.assert_close(mean['state_dict']['0.weight'], expected)
    with averaged('anything', 1) as path:
        assert path == 'anything'
    other = torch.load(last := tmp_path / 'epoch_11.pth', weights_only=True)
    torch.save(other | dict(meta=dict(epoch=11, iter=1100, seed=1)), last)
    with pytest.raises(UserError, match='epoch_11.pth. must be of the run of .*, got another seed'):
        averaged(str(last), 2).__enter__()
    for number, error in ((5, UserError), (0, ValueError)):
        with pytest.raises(error, match='--average must be .* got'):
            averaged(str(tmp_path / 'epoch_11.pth'), number).__enter__()


@pytest.mark.parametrize(
    'files, message',
    [
        (['a.pth'], 'must be two files or more'),
        (['a.pth', 'wide.pth'], "'wide.pth' must have the weights of 'a.pth'"),
        (['a.pth', 'empty.pth'], "'empty.pth' must have a state_dict"),
        (['a.pth', 'none.pth'], 'none.pth'),
        (['a.pth', 'mean.pth'], "--out must not replace data, got 'mean.pth', a file that the"),
    ],
)
def test_what_cannot_be_averaged_is_refused(files, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save('a.pth', 1)
    save('wide.pth', 1, width=4)
    torch.save(dict(meta={}), 'empty.pth')
    if 'mean.pth' in files:
        save('mean.pth', 2)
    stops(f'^Error: .*{message}', average_files, [*files, '--out', 'mean.pth'])
    assert Path('mean.pth').exists() == ('mean.pth' in files)


def test_a_full_disk_leaves_the_file_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        save(f'epoch_{seed}.pth', seed, width=3000)
    words = ['epoch_1.pth', 'epoch_2.pth', '--out', 'mean.pth']
    average_files(words)
    size = Path('mean.pth').stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))
    try:
        stops('File too large.*mean.pth', average_files, words)
        words = ['mean.pth', 'published.pth', '--license', 'cc0-1.0']
        stops('File too large.*published', publish, words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(load_from_local('mean.pth', 'cpu')['state_dict']) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'epoch_1.pth',
        'epoch_2.pth',
        'mean.pth',
    ]
