"""The hooks, each on a runner or on a stand-in with the attributes that it reads."""

import copy
import gc
import itertools
import logging
import multiprocessing
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.dataset import BaseDataset
from mmengine.evaluator import Evaluator
from mmengine.model import BaseModel
from mmengine.runner import IterBasedTrainLoop
from mmpretrain.structures import DataSample
from PIL import Image
from scipy.special import softmax
from scipy.stats import entropy
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.data import DataLoader

from aft_mm.datasets import Digits
from aft_mm.engine import (
    AutocastOptimWrapper,
    CheckImagesHook,
    CheckpointCompatibilityHook,
    CompileHook,
    ExactResumeHook,
    RegularizationHook,
)
from aft_mm.engine.hooks.resume import check_random_state, random_state, set_random_state
from aft_mm.engine.hooks.training import EpochTimeHook, parts_to_compile
from aft_mm.engine.loops import Batches, make_resumable
from aft_mm.engine.preflight import check_metrics, check_regularization, check_topk
from aft_mm.errors import UserError
from aft_mm.layers import PositionEmbedding
from aft_mm.registry import DATASETS, METRICS, MODELS

from ..errors import refuses, refuses_input

MIXER = dict(type='aft_mm.AFTConv', embed_dims=12, grid=(5, 7), num_heads=4, kernel_size=3)


class Penalised(nn.Linear):
    def regularization_loss(self):
        return self.weight.square().mean()


class Model(BaseModel):
    def __init__(self, width=7, layer=Penalised):
        super().__init__()
        self.backbone = nn.Sequential(layer(5, width), nn.GELU(), layer(width, 5))

    def forward(self, x, mode='tensor'):
        y = self.backbone(x)
        return dict(loss=y.mean()) if mode == 'loss' else y


class Images(BaseDataset):
    def __init__(self, path):
        self.path = str(path)
        super().__init__()

    def load_data_list(self):
        return [dict(img_path=self.path)]


def runner(model=None, **kwargs):
    return SimpleNamespace(model=model or Model(), experiment_name='this_config', **kwargs)


class TestCompileHook:
    @pytest.fixture
    def model(self):
        torch._dynamo.reset()
        model, mixer = Model(), dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=3)
        vit = dict(type='aft_mm.AFTViT', arch=dict(embed_dims=16, num_layers=2), img_size=8)
        model.backbone = MODELS.build(dict(vit, patch_size=2, token_mixer=mixer))
        return model

    def test_one_graph_same_result_same_keys_also_of_a_copy(self, model):
        x, keys = torch.randn(3, 3, 8, 8), list(model.state_dict())
        expected = model.backbone(x)
        graphs = CompileCounter()
        CompileHook(backend=graphs).before_run(runner(model))
        torch.testing.assert_close(model.backbone(x), expected)
        assert graphs.frame_count == 1
        assert list(model.state_dict()) == keys
        # As of the EMA model.
        torch.testing.assert_close(copy.deepcopy(model).backbone(x), expected)

    def test_under_autocast(self, model):
        CompileHook(backend='eager').before_run(runner(model))
        optim = AutocastOptimWrapper(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        with optim.optim_context(model):
            loss = model.backbone(torch.randn(3, 3, 8, 8))[0].float().square().mean()
        optim.update_params(loss)
        assert all(torch.isfinite(value).all() for value in model.parameters())

    def test_a_graph_break_is_an_error(self, model):
        model.backbone.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        CompileHook(backend='eager').before_run(runner(model))
        with pytest.raises(torch._dynamo.exc.Unsupported):
            model.backbone(torch.randn(3, 3, 8, 8))

    def test_backbones_and_decoders_of_this_package_are_found(self, model, caplog):
        assert parts_to_compile(model) == ['backbone']
        model.decoder, model.neck = copy.deepcopy(model.backbone), nn.Identity()
        assert parts_to_compile(model) == ['backbone', 'decoder']
        model.backbone = nn.Identity()
        assert parts_to_compile(model) == ['decoder']
        hook, log = CompileHook(module=None, backend='eager'), logging.getLogger('compile')
        this = runner(model, logger=log)
        hook.before_run(this)
        assert model.decoder._compiled_call_impl is not None
        with caplog.at_level(logging.INFO, 'compile'):
            for _ in range(2):
                hook.before_train_iter(this, 0)
                hook.after_train_iter(this, 0)
        assert len(caplog.records) == 1 and 'compile=False turns this off' in caplog.text
        model.encoder = nn.Identity()
        assert parts_to_compile(model) == []


class TestExactResumeHook:
    def seeded(self, iteration, rank=0):
        run = dict(seed=3, iter=iteration, rank=rank, train_loop=None, distributed=False)
        ExactResumeHook().before_train_epoch(SimpleNamespace(**run))
        return torch.rand(1).item(), np.random.rand(), random.random()

    def test_an_epoch_depends_on_seed_iteration_and_rank_only(self):
        first = self.seeded(12)
        torch.rand(5), np.random.rand(5)
        assert self.seeded(12) == first
        values = [value for i in (0, 6) for rank in (0, 1) for value in self.seeded(i, rank)]
        assert len(set(values)) == len(values)

    def test_a_checkpoint_restores_the_random_state(self, tmp_path):
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
        torch.save(random_state(), tmp_path / 'state.pth')

        def sample():
            return random.gauss(0, 1), np.random.randn(), torch.randn(3).tolist()

        first = sample()
        state = torch.load(tmp_path / 'state.pth', weights_only=True)
        check_random_state(state)
        assert sample() != first
        set_random_state(state)
        assert sample() == first

    @pytest.mark.parametrize(
        'state',
        [
            {},
            [],
            dict(python=[3, torch.zeros(5), None], numpy=['MT19937'], torch=torch.zeros(3)),
            dict(random_state(), torch=torch.zeros(9, dtype=torch.uint8)),
            dict(random_state(), numpy=['MT19937', torch.zeros(9), 0, 0, 0.0]),
        ],
    )
    def test_other_values_are_refused(self, state):
        with pytest.raises(UserError, match='the random state of the checkpoint cannot be used'):
            ExactResumeHook().after_load_checkpoint(None, dict(meta=dict(random_state=state)))


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index, random.random(), np.random.rand(), torch.rand(1).item()


def noise_loader(num_workers, **options):
    return DataLoader(Noise(), 3, num_workers=num_workers, collate_fn=list, **options)


def numbers(batches):
    return [[item[0] for item in batch] for batch in batches]


def test_batches_depend_on_their_number_only():
    whole = list(Batches(noise_loader(0), (7, 0)).start(0))
    for loader in (noise_loader(1), noise_loader(2, persistent_workers=True)):
        batches = Batches(loader, (7, 0))
        assert list(batches.start(2)) == whole[2:]
        assert list(batches.start(0)) == whole
        later = list(batches.start(0, 4))
        assert numbers(later) == numbers(whole)
        noise, other = ({item[1] for batch in each for item in batch} for each in (later, whole))
        assert not noise & other
    assert list(Batches(noise_loader(0), (7, 1)).start(0)) != whole


def test_workers_end_with_the_interpreter():
    batches = Batches(noise_loader(2, persistent_workers=True), (7, 0))
    list(batches.start(0))
    workers = multiprocessing.active_children()
    assert len(workers) >= 2
    for worker in workers:
        worker.terminate()  # as at exit
        worker.join(20)
        assert not worker.is_alive()


def test_endless_batches_restart_the_sampler():
    batches = Batches(noise_loader(0), (7, 0), endless=True)
    first = list(itertools.islice(batches.start(0), 10))
    assert list(itertools.islice(batches.start(6), 4)) == first[6:]
    assert numbers(first[4:8]) == numbers(first[:4])


class TestRegularizationHook:
    def test_adds_the_weighted_sum_of_the_layers_to_the_losses_only(self):
        model, x = Model(), torch.randn(3, 5)
        RegularizationHook(weight=0.5).before_train(runner(model))
        losses = model(x, mode='loss')
        expected = 0.5 * sum(model.backbone[i].weight.square().mean() for i in (0, 2))
        torch.testing.assert_close(losses['loss_regularization'], expected)
        assert isinstance(model(x), torch.Tensor)
        total, _ = model.parse_losses(losses)
        plain = Model.forward(model, x, mode='loss')['loss']
        torch.testing.assert_close(total, plain + expected)
        losses['loss_regularization'].backward()
        weight = model.backbone[0].weight
        torch.testing.assert_close(weight.grad, weight.detach() / weight.numel())

    def test_entropy_is_that_of_equation_9_over_all_heads_of_all_layers(self):
        model, x = Model(), torch.randn(2, 35, 12)
        layers = [MODELS.build(dict(MIXER, sparsity='entropy')) for _ in range(3)]
        model.backbone = nn.Sequential(*layers)
        kernels = []
        for layer in layers:
            nn.init.normal_(layer.pos_bias.gamma)
            nn.init.normal_(layer.pos_bias.beta)
            kernels.extend(layer.position_bias().detach().flatten(1).numpy())
        RegularizationHook(weight=0.001).before_train(runner(model))
        expected = 0.001 * sum(entropy(softmax(kernel)) for kernel in kernels)
        assert len(kernels) == 12
        assert model(x, mode='loss')['loss_regularization'].item() == pytest.approx(expected)

    def test_no_layer_to_regularise_is_an_error(self):
        with pytest.raises(UserError, match=r'weight=0\.1.*regularization_loss.*none'):
            RegularizationHook(weight=0.1).before_train(runner(Model(layer=nn.Linear)))

    def test_a_penalty_without_a_hook_is_an_error(self):
        plain, sparse = (MODELS.build(dict(MIXER, sparsity=kind)) for kind in ('none', 'entropy'))
        for model in (plain, sparse):
            check_regularization(None, runner(model, hooks=[RegularizationHook(weight=0.1)]))
        check_regularization(None, runner(plain, hooks=[ExactResumeHook()]))
        with pytest.raises(UserError, match='custom_hooks has no .*RegularizationHook'):
            check_regularization(None, runner(sparse, hooks=[ExactResumeHook()]))


class TestCheckpointCompatibilityHook:
    def check(self, state, strict=True, model=None):
        checkpoint = dict(state_dict=state, meta=dict(experiment_name='that_run'))
        CheckpointCompatibilityHook(strict).after_load_checkpoint(runner(model), checkpoint)

    def test_own_weights_fit_and_others_are_counted(self):
        state = Model().state_dict()
        self.check(state)
        self.check({f'module.{name}': value for name, value in state.items()})  # of a wrapper
        self.check({name: state[name] for name in list(state)[:1]}, strict=False)  # fine-tuning
        message = 'that_run.*this_config.*0 .*missing, 0 unexpected and 3 of another shape'
        refuses_input(message, self.check, Model(width=9).state_dict())
        state = {f'x.{name}': value for name, value in state.items()}
        message = '4 tensors are missing, 4 unexpected and 0 of another'
        refuses_input(message, self.check, state)

    @pytest.mark.parametrize('strict', [True, False])
    def test_interpolated_tensors_are_logged(self, strict, monkeypatch):
        lines = []
        monkeypatch.setattr('aft_mm.checkpoint.loading.warn', lines.append)
        short, long = (Model() for _ in range(2))
        short.positions, long.positions = PositionEmbedding((8,), 3), PositionEmbedding((13,), 3)
        self.check(long.state_dict(), strict, long)
        assert not lines
        self.check(short.state_dict(), strict, long)
        assert lines == [
            'the checkpoint is interpolated to the sizes of this model: '
            'positions.weight from [8, 3] to [13, 3], 1 in all'
        ]
        hook = CheckpointCompatibilityHook(strict, resume=True)
        with pytest.raises(UserError, match='resumed with positions.weight of another size'):
            hook.after_load_checkpoint(runner(long), dict(state_dict=short.state_dict()))
        hook.after_load_checkpoint(runner(long), dict(state_dict=long.state_dict()))

    @pytest.mark.parametrize('strict', [True, False])
    def test_errors_of_the_model_are_passed_on(self, strict):
        model = Model()

        def refuse(*args):
            raise ValueError('this is a checkpoint of a tree, but the model is a house')

        model.backbone.register_load_state_dict_pre_hook(refuse)
        refuses_input('tree.*house', self.check, Model().state_dict(), strict, model)


class TestCheckImagesHook:
    @pytest.fixture
    def image(self, tmp_path):
        noise = np.random.default_rng(0).integers(0, 256, (40, 31, 3), dtype=np.uint8)
        path = tmp_path / 'a.JPEG'
        Image.fromarray(noise).save(path, format='jpeg')
        return path

    def check(self, path, rank=0, world_size=1):
        self.check_dataset(Images(path), rank, world_size)

    def check_dataset(self, dataset, rank=0, world_size=1):
        run = dict(rank=rank, world_size=world_size, val_loop=None, logger=logging.getLogger('a'))
        loader = torch.utils.data.DataLoader(dataset)
        CheckImagesHook().before_train(SimpleNamespace(train_dataloader=loader, **run))

    def test_a_whole_image_passes_also_with_bytes_after_its_end(self, image, caplog):
        with caplog.at_level(logging.INFO):
            self.check(image)
        assert 'checking 1 image files' in caplog.text
        image.write_bytes(image.read_bytes() + bytes(5000))
        self.check(image)

    @pytest.mark.parametrize('share', [0.3, 0.9, 0.999])
    @pytest.mark.parametrize('thumbnail', [False, True])
    def test_a_truncated_jpeg_is_named(self, image, share, thumbnail):
        """An end marker in a comment, as of a thumbnail, does not hide it."""
        data = image.read_bytes()
        if thumbnail:
            comment = (
                b'\xff\xfe\x00\x06' + b'ab\xff\xd9'
            )  # as long as its third and fourth byte say
            data = data[:2] + comment + data[2:]
            image.write_bytes(data)
            self.check(image)
        image.write_bytes(data[: int(share * len(data))])
        refuses_input(f"'{image}' of the training set is truncated", self.check, image)

    def test_images_of_validation_and_test_are_read_too(self, image, tmp_path):
        cut = tmp_path / 'cut.jpg'
        cut.write_bytes(image.read_bytes()[:-20])
        good, bad = (SimpleNamespace(dataset=Images(path)) for path in (image, cut))
        loops = {name: SimpleNamespace(dataloader=bad) for name in ('val_loop', 'test_loop')}
        logger = logging.getLogger('a')
        run = runner(rank=0, world_size=1, logger=logger, train_dataloader=good, **loops)
        hook = CheckImagesHook()
        refuses_input("cut.jpg' of the validation set is truncated", hook.before_train, run)
        refuses_input("cut.jpg' of the test set is truncated", hook.before_test, run)
        run.val_loop.dataloader = good
        hook.before_train(run)

    def test_each_rank_reads_its_share(self, image):
        image.write_bytes(b'')
        self.check(image, rank=1, world_size=2)

    @pytest.mark.parametrize('kind', ['CelebA', 'ImageFolder'])
    def test_data_sets_of_files_name_theirs(self, tmp_path, image, kind):
        folder = tmp_path / 'img_align_celeba'
        folder.mkdir()
        path = image.rename(folder / 'a.jpg')
        (tmp_path / 'list_eval_partition.txt').write_text('a.jpg 0')
        config = dict(type=f'aft_mm.{kind}', data_root=str(tmp_path))
        dataset = DATASETS.build(dict(config, test_mode=True))
        self.check_dataset(dataset)
        path.write_bytes(path.read_bytes()[:-20])
        message = rf"'{path}' of the training set is truncated"
        refuses_input(message, self.check_dataset, dataset)
        pipeline = [dict(type='aft_mm.LoadRGBImage')]  # with which training replaces such files
        self.check_dataset(DATASETS.build(dict(config, pipeline=pipeline)))
        refuses_input(message, self.check_dataset, DATASETS.build(config))

    def test_data_without_files_passes(self):
        self.check_dataset(torch.utils.data.TensorDataset(torch.zeros(3, 1)))
        self.check_dataset(Digits())


@pytest.mark.parametrize(('done', 'logged'), [(0, [3]), (2, [])])
def test_the_time_of_a_resumed_epoch_is_not_logged(done, logged):
    epochs = []
    runner = SimpleNamespace(
        iter=10 + done,
        epoch=2,
        train_loop=SimpleNamespace(dataloader=range(5)),
        logger=logging.getLogger('epochs'),
        visualizer=SimpleNamespace(add_scalar=lambda name, value, step: epochs.append(step)),
    )
    hook = EpochTimeHook()
    hook.before_train_epoch(runner)
    runner.iter = 15
    hook.after_train_epoch(runner)
    assert epochs == logged


@pytest.mark.parametrize('topk, most', [((1, 3), 3), (4, 4), (None, 0)])
def test_topk_is_compared_with_the_classes(topk, most):
    """That of a multi-label metric is an int."""
    model = SimpleNamespace(head=SimpleNamespace(num_classes=3))
    evaluator = SimpleNamespace(metrics=[SimpleNamespace(topk=topk)])
    if most <= 3:
        check_topk(model, evaluator, 'val')
    else:
        refuses(
            'must be at most 3, the number of classes, got 4', check_topk, model, evaluator, 'val'
        )


@pytest.mark.parametrize(
    ('name', 'reason'),
    [
        ('aft_mm.Likelihood', "needs 'nats' (.*likelihood.py:[0-9]+)"),
        ('aft_mm.TokenAccuracy', 'fails: TokenAccuracy needs samples with num_correct'),
        ('aft_mm.BLEU', 'fails: BLEU needs samples with a translation'),
        ('mmpretrain.SingleLabelMetric', "needs 'pred_label'"),
    ],
)
def test_metrics_of_another_task_are_refused_at_the_first_batch(name, reason):
    sample = DataSample().set_gt_label(1).set_pred_score(torch.tensor([0.1, 0.9]))
    if 'Single' in name:
        del sample.pred_score
    evaluator = Evaluator([METRICS.build(dict(type=name))])
    check_metrics(evaluator, 'test')
    message = '^test_evaluator must have metrics of samples with .*gt_label.*, got .*, which '
    refuses_input(message + reason, evaluator.process, [sample])
    check_metrics(evaluator, 'test')
    process = evaluator.metrics[0].process
    if 'Single' in name:
        refuses_input('samples with None, got', process, data_batch=None, data_samples=[None])


def test_a_metric_of_the_task_stays_as_it_was():
    evaluator = Evaluator([METRICS.build(dict(type='mmpretrain.Accuracy'))])
    check_metrics(evaluator, 'val')
    sample = DataSample().set_gt_label(1).set_pred_score(torch.tensor([0.1, 0.9]))
    for _ in range(2):
        evaluator.process([sample])
    assert evaluator.evaluate(2) == {'accuracy/top1': 100.0}
    with pytest.raises(KeyError):  # a fault of the data
        evaluator.process([DataSample(nats=1.0)])


def test_an_iteration_loop_keeps_one_set_of_workers():
    """mmengine starts workers before its iterator is replaced."""
    loader = noise_loader(2, persistent_workers=True)
    before = set(multiprocessing.active_children())
    runner = SimpleNamespace(train_dataloader=loader)
    loop = IterBasedTrainLoop(runner, loader, max_iters=3)
    make_resumable(loop, (7, 0))
    loop._iter = 0
    next(loop.dataloader_iterator)
    gc.collect()
    assert len(set(multiprocessing.active_children()) - before) == 2
