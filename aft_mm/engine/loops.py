"""Training loops that stop and resume, and tests that sample or translate."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from mmengine.runner import (
    BaseLoop,
    EpochBasedTrainLoop,
    IterBasedTrainLoop,
    Runner,
    TestLoop,
    autocast,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset

from aft_mm.checks import check_int, check_number
from aft_mm.errors import UserError
from aft_mm.registry import LOOPS
from aft_mm.structures import SequenceSample

from .runner import task_model
from .stop_signals import protect_workers, starting_workers


class StoppableEpochLoop(EpochBasedTrainLoop):
    """mmengine's epoch loop, which also checks ``stop_training`` after every iteration.

    With ``num_done`` the next epoch resumes after that many of its iterations.
    """

    num_done = 0
    begin = (0, 0)  # epoch and iteration at which the current epoch started
    batches: 'Batches | None' = None
    restore: Callable[[], None] | None = None

    def run_epoch(self) -> None:
        num_done, self.num_done = self.num_done, 0
        self.begin = self._epoch, self._iter - num_done
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        batches = (self.batches or Batches(self.dataloader)).start(num_done, self.begin[1])
        if num_done and self.restore is not None:
            self.restore()
        for index, batch in enumerate(batches, num_done):
            self.run_iter(index, batch)
            if self.stop_training and index + 1 < len(self.dataloader):
                self.val_begin = self.max_epochs + 1  # else mmengine would validate
                return
        self.runner.call_hook('after_train_epoch')
        self._epoch += 1

    def num_done_at(self, epoch: int, iteration: int) -> int:
        """Return how many iterations of ``epoch`` (from 0) are done after ``iteration`` in all."""
        return iteration - self.begin[1] if epoch == self.begin[0] else 0


class EndlessBatches(Iterator):
    def __init__(self, loop: IterBasedTrainLoop, batches: 'Batches') -> None:
        self.loop = loop
        self.batches = batches
        self.num_skipped = 0
        self.iterator: Iterator | None = None
        self.restore: Callable[[], None] | None = None

    def __next__(self) -> Any:
        if self.iterator is None:
            num_done = self.loop.iter
            if self.num_skipped < num_done:
                self.num_skipped += 1
                return None
            self.iterator = self.batches.start(num_done)
            if num_done and self.restore is not None:
                self.restore()
        return next(self.iterator)


def make_resumable(loop: BaseLoop, seeds: Sequence[int] | None = None) -> None:
    """Let mmengine's train loop stop and resume at any iteration; `seeds` are those of Batches.

    Its class and iterator are replaced, because configs select mmengine's loops.
    """
    if isinstance(loop.dataloader.dataset, IterableDataset):  # its samples have no numbers
        return
    if type(loop) is EpochBasedTrainLoop:
        loop.__class__ = StoppableEpochLoop
    if isinstance(loop, StoppableEpochLoop):
        if seeds is not None:
            loop.batches = Batches(loop.dataloader, seeds)
    elif type(loop) is IterBasedTrainLoop and (
        seeds is not None or not isinstance(loop.dataloader_iterator, EndlessBatches)
    ):
        batches = Batches(loop.dataloader, seeds or (), endless=True)
        loop.dataloader_iterator = EndlessBatches(loop, batches)
        loop.dataloader._iterator = None  # ends the workers that the loop has started


class Batches:
    """The batches of a data loader from any batch on, each with its own random numbers.

    Args:
        loader: The data loader, whose workers are started again here.
        seeds: Numbers, 0 or larger, that seed each batch together with its own seed; none leaves
            the generators alone.
        endless: Restart the sampler at its end, with the next epoch.
    """

    def __init__(
        self, loader: DataLoader, seeds: Sequence[int] = (), endless: bool = False
    ) -> None:
        self.loader = loader
        self.is_seeded = bool(seeds)
        self.seeds = tuple(seeds)
        self.endless = endless
        self.first = self.offset = 0
        self.own: DataLoader | None = None  # with persistent workers

    def start(self, first: int, offset: int = 0) -> Iterator:
        """Return an iterator from batch ``first`` on; batch i has number ``offset + i``."""
        self.first, self.offset = first, offset
        protect_workers(self.loader)  # starting_workers leaves signals blocked in other workers
        with starting_workers():
            return iter(self._loader())

    def _loader(self) -> DataLoader:
        loader, sampler = self.loader, sampler_of(self.loader)
        if not (self.first or self.is_seeded or self.endless):
            return loader
        if self.endless and hasattr(sampler, '_indices_of_rank'):
            # InfiniteSampler would continue after the batches that the loop prefetched.
            sampler.indices = sampler._indices_of_rank()
        if self.own is not None:
            return self.own
        own = DataLoader(
            SeededBatches(loader.dataset, self.seeds) if self.is_seeded else loader.dataset,
            batch_sampler=NumberedBatchSampler(self),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            # A new iterator takes a number from the generator; from that of the process, a resumed
            # run would differ.
            generator=torch.Generator() if self.is_seeded else loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )
        if loader.persistent_workers:
            self.own = own
        return own


class NumberedBatchSampler:
    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches.loader) - self.batches.first

    def __iter__(self) -> Iterator:
        owner = self.batches
        for number, indices in enumerate(islice(self._all(), owner.first, None), owner.first):
            yield (owner.offset + number, indices) if owner.is_seeded else indices

    def _all(self) -> Iterator:
        loader = self.batches.loader
        sampler = sampler_of(loader)
        batch_sampler: Any = loader.batch_sampler
        yield from batch_sampler
        for epoch in count(1) if self.batches.endless and len(loader) else ():
            if hasattr(sampler, 'set_epoch'):
                sampler.set_epoch(epoch)
            yield from batch_sampler


class SeededBatches(Dataset):
    def __init__(self, dataset: Any, seeds: Sequence[int]) -> None:
        self.dataset = dataset
        self.seeds = seeds

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, batch: tuple[int, Sequence[int]]) -> list:
        number, indices = batch
        seed = derived_seed(*self.seeds, number)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if getattr(self.dataset, '__getitems__', None):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]


def sampler_of(loader: DataLoader) -> Any:
    return getattr(loader.batch_sampler, 'sampler', loader.sampler)


def derived_seed(seed: int, *parts: int) -> int:
    """Return a 63-bit seed of a sample from the run's seed and numbers, 0 or larger."""
    return int(np.random.SeedSequence([seed, *parts]).generate_state(1, np.uint64)[0]) >> 1


@LOOPS.register_module()
class GenerationTestLoop(TestLoop):
    """A test that also samples from the model: every sample of the data set gets ``generated``.

    These are ``num_samples`` sequences of tokens, int64 ``[N, T]`` or ``[N, T, C]``, as long as the
    sample, given its ``source`` if there is an encoder.

    Args:
        runner, dataloader, evaluator: As for mmengine's TestLoop.
        fp16: Whether to test and sample under autocast.
        num_samples: Sequences per sample.
        temperature, top_k, top_p: See :func:`aft_mm.models.generate`.
        seed: 0 or larger; a batch is seeded from (``seed``, rank, batch number).
        num_inputs: Sample for the first ``num_inputs`` samples only, over all ranks.
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
        check_int('num_samples of test_cfg', num_samples, 1)
        check_int('seed of test_cfg', seed, 0)
        check_int('num_inputs of test_cfg', num_inputs or 0, 0)
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
        self.seen = 0

    def run(self) -> dict:
        self.seen = 0
        return super().run()

    @torch.no_grad()
    def run_iter(self, idx: int, data_batch: dict) -> None:
        inputs, samples = data_batch['inputs'], data_batch['data_samples']
        num = len(samples)
        if self.num_inputs is not None:
            # Sample i of this rank is i·world_size + rank.
            share = -(-(self.num_inputs - self.runner.rank) // self.runner.world_size)
            num = min(num, max(0, share - self.seen))
        self.seen += len(samples)
        if num:
            self._sample(idx, inputs[:num], samples[:num])
        super().run_iter(idx, data_batch)

    def _sample(
        self, idx: int, inputs: Sequence[torch.Tensor], samples: Sequence[SequenceSample]
    ) -> None:
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
        for sample, source, rows in zip(samples, inputs, sampled, strict=True):
            sample.generated = rows[:, : len(source)]


@LOOPS.register_module()
class TranslationTestLoop(TestLoop):
    """A test that also translates by beam search: every sample gets the text ``translation``.

    Args:
        runner, dataloader, evaluator: As for mmengine's TestLoop; the data set has ``subwords``.
        fp16: Whether to test and translate under autocast.
        beam_size: Hypotheses kept at every token; 1 is greedy.
        length_penalty: Exponent, 0 to 10, of the length by which scores are divided.

    Raises:
        UserError: The data set has no ``subwords``.
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
        check_number('length_penalty of test_cfg', length_penalty, 0, 10)
        super().__init__(runner, dataloader, evaluator, fp16)
        self.options = dict(beam_size=beam_size, length_penalty=length_penalty)
        self.subwords: Any = getattr(self.dataloader.dataset, 'subwords', None)
        if self.subwords is None:
            raise UserError(
                'TranslationTestLoop needs a data set with subwords, such as '
                f'ParallelText, got {type(self.dataloader.dataset).__name__}'
            )

    @torch.no_grad()
    def run_iter(self, idx: int, data_batch: dict) -> None:
        samples = data_batch['data_samples']
        # An empty line, whose only token is the end, has an empty translation, as in Translator.
        given = [sample for sample in samples if len(sample.source) > 1]
        hypotheses = []
        if given:
            with autocast(enabled=self.fp16):
                hypotheses = task_model(self.runner).beam_search(
                    [sample.source for sample in given], self.subwords.end, **self.options
                )
        for sample in samples:
            sample.set_metainfo(dict(translation=''))
        for sample, (best, *_) in zip(given, hypotheses, strict=True):
            sample.set_metainfo(dict(translation=self.subwords.decode(best.tokens.tolist())))
        super().run_iter(idx, data_batch)
