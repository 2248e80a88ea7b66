"""Loops: an epoch loop that can stop and resume, and test loops that sample or translate."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from mmengine.runner import EpochBasedTrainLoop, Runner, TestLoop, autocast
from torch.utils.data import DataLoader

from aft_mm.checks import check_int, check_number
from aft_mm.errors import UserError
from aft_mm.registry import LOOPS
from aft_mm.structures import SequenceSample

from .runner import task_model


class StoppableEpochLoop(EpochBasedTrainLoop):
    """mmengine's epoch loop, which also checks ``stop_training`` after every iteration.

    An epoch that is stopped early does not count, is not followed by ``after_train_epoch`` and is
    not validated. With ``num_done`` the next epoch resumes after that many of its iterations.
    """

    num_done = 0
    begin = (0, 0)  # epoch and iteration at which the current epoch started

    def run_epoch(self) -> None:
        """Run an epoch, or the rest of it, until its end or ``stop_training``."""
        num_done, self.num_done = self.num_done, 0
        self.begin = self._epoch, self._iter - num_done
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        loader = remaining_batches(self.dataloader, num_done) if num_done else self.dataloader
        for index, batch in enumerate(loader, num_done):
            self.run_iter(index, batch)
            if self.stop_training and index + 1 < len(self.dataloader):
                self.val_begin = self.max_epochs + 1  # else mmengine's loop would validate
                return
        self.runner.call_hook('after_train_epoch')
        self._epoch += 1

    def num_done_at(self, epoch: int, iteration: int) -> int:
        """Return how many iterations of ``epoch`` (from 0) are done after ``iteration`` in all."""
        return iteration - self.begin[1] if epoch == self.begin[0] else 0


def remaining_batches(loader: DataLoader, num_done: int) -> DataLoader:
    """Return a loader of the same batches without the first ``num_done``, which are not read."""
    return DataLoader(
        loader.dataset,
        batch_sampler=list(islice(loader.batch_sampler, num_done, None)),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )


def derived_seed(seed: int, *parts: int) -> int:
    """Return a 63-bit seed for one of many samples: same numbers, same seed; else unrelated.

    Args:
        seed: Seed of the run, 0 or larger.
        *parts: Numbers that identify the sample, such as rank and batch; 0 or larger.
    """
    return int(np.random.SeedSequence([seed, *parts]).generate_state(1, np.uint64)[0]) >> 1


@LOOPS.register_module()
class GenerationTestLoop(TestLoop):
    """A test that also samples from the model: every sample of the data set gets ``generated``.

    ``generated`` holds ``num_samples`` sequences of tokens, int64 ``[N, T]`` or ``[N, T, C]``, as long
    as the sample's own and sampled from the first token on, with an encoder given the sample's
    ``source``. The batch is then tested as usual, so a metric finds likelihood and sampled tokens
    in one sample. The seed of a batch is derived from (``seed``, rank, batch number): batches do
    not share noise, and runs with the same number of processes sample the same. The first rank
    shows a progress bar of the tokens on stderr.

    Args:
        runner: The runner.
        dataloader: As for mmengine's TestLoop.
        evaluator: As for mmengine's TestLoop.
        fp16: Whether to test and sample under autocast.
        num_samples: Sequences per sample.
        temperature: Divides the logits; below 1 likely values become likelier.
        top_k: Sample among the k most likely values only.
        top_p: Sample among the most likely values with this total probability only.
        seed: 0 or larger.
        num_inputs: Sample for the first ``num_inputs`` samples of the data set only, over all
            ranks; the others get no ``generated``. Needs a sampler in the order of the data set.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        runner: Runner,
        dataloader: Any,
        evaluator: Any,
        fp16: bool = False,
        num_samples: int = 1,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        num_inputs: int | None = None,
    ) -> None:
        for name, value, least in (
            ('num_samples', num_samples, 1),
            ('seed', seed, 0),
            ('num_inputs', 1 if num_inputs is None else num_inputs, 1),
        ):
            check_int(f'{name} of test_cfg', value, least)
        check_number('temperature of test_cfg', temperature, above=0)
        if top_k is not None:
            check_int('top_k of test_cfg', top_k, 1)
        if top_p is not None:
            check_number('top_p of test_cfg', top_p, above=0, most=1)
        super().__init__(runner, dataloader, evaluator, fp16)
        self.num_samples = num_samples
        self.options = dict(temperature=temperature, top_k=top_k, top_p=top_p)
        self.seed = seed
        self.num_inputs = num_inputs
        self.seen = 0  # samples of this rank in previous batches

    def run(self) -> dict:
        """Sample and test; return the metrics."""
        self.seen = 0
        return super().run()

    @torch.no_grad()
    def run_iter(self, idx: int, data_batch: dict) -> None:
        """Sample for batch ``idx``, then test it."""
        inputs, samples = data_batch['inputs'], data_batch['data_samples']
        num = len(samples)
        if self.num_inputs is not None:
            # mmengine distributes samples in turn: the i-th of this rank is i·world_size + rank.
            share = -(-(self.num_inputs - self.runner.rank) // self.runner.world_size)
            num = min(num, max(0, share - self.seen))
        self.seen += len(samples)
        if num:
            self._sample(idx, inputs[:num], samples[:num])
        super().run_iter(idx, data_batch)

    def _sample(
        self, idx: int, inputs: Sequence[torch.Tensor], samples: Sequence[SequenceSample]
    ) -> None:
        """Give every sample ``num_samples`` sequences as long as its input."""
        sources = [sample.get('source') for sample in samples for _ in range(self.num_samples)]
        with autocast(enabled=self.fp16):
            tokens = task_model(self.runner).generate(
                max(map(len, inputs)),
                batch_size=len(sources),
                source=None if sources[0] is None else sources,
                seed=derived_seed(self.seed, self.runner.rank, idx),
                progress=self.runner.rank == 0,
                **self.options,
            )
        sampled = tokens.unflatten(0, (len(samples), self.num_samples))
        for sample, own, rows in zip(samples, inputs, sampled, strict=True):
            sample.generated = rows[:, : len(own)]


@LOOPS.register_module()
class TranslationTestLoop(TestLoop):
    """A test that also translates: every sample of the data set gets the text ``translation``.

    The translation is found by beam search from the sample's ``source``. The batch is then tested
    as usual, so a metric finds likelihood and translation in one sample.

    Args:
        runner: The runner.
        dataloader: As for mmengine's TestLoop, over a data set with ``subwords``.
        evaluator: As for mmengine's TestLoop.
        fp16: Whether to test and translate under autocast.
        beam_size: Hypotheses kept at every token; 1 is greedy.
        length_penalty: Exponent of the length by which scores are divided; larger values prefer
            longer translations.

    Raises:
        ValueError: an option is out of range.
        UserError: the data set has no ``subwords``.
    """

    def __init__(
        self,
        runner: Runner,
        dataloader: Any,
        evaluator: Any,
        fp16: bool = False,
        beam_size: int = 4,
        length_penalty: float = 0.6,
    ) -> None:
        check_int('beam_size of test_cfg', beam_size, 1)
        check_number('length_penalty of test_cfg', length_penalty, 0)
        super().__init__(runner, dataloader, evaluator, fp16)
        self.options = dict(beam_size=beam_size, length_penalty=length_penalty)
        self.subwords = getattr(self.dataloader.dataset, 'subwords', None)
        if self.subwords is None:
            raise UserError(
                'TranslationTestLoop needs a data set with subwords, such as '
                f'ParallelText, got {type(self.dataloader.dataset).__name__}'
            )

    @torch.no_grad()
    def run_iter(self, idx: int, data_batch: dict) -> None:
        """Translate batch ``idx``, then test it."""
        samples = data_batch['data_samples']
        with autocast(enabled=self.fp16):
            found = task_model(self.runner).beam_search(
                [sample.source for sample in samples], self.subwords.end, **self.options
            )
        for sample, (best, *_) in zip(samples, found, strict=True):
            sample.set_metainfo(dict(translation=self.subwords.decode(best.tokens.tolist())))
        super().run_iter(idx, data_batch)
