"""Tests that draw samples, or translate, on their way."""

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.runner import Runner, TestLoop, autocast

from aft_mm.checks import check_int, check_number
from aft_mm.errors import UserError
from aft_mm.registry import LOOPS
from aft_mm.structures import SequenceSample

from .hooks.task_model import task_model
from .seeds import derived_seed


@LOOPS.register_module()
class GenerationTestLoop(TestLoop):
    """A test that also draws from the model: every sample of the data set gets ``drawn``.

    ``drawn`` are ``num_samples`` sequences of tokens, int64 ``[N, T]`` or ``[N, T, C]``, as long as
    the sample's own, drawn from the first token on: with an encoder from the sample's ``source``,
    else from nothing. Then the test goes on as mmengine's, so that a metric finds likelihood and
    drawn tokens in one sample. The seed of a batch is made from (``seed``, rank, batch number): no
    two batches share noise, and two runs with as many processes draw the same. A bar of the tokens
    of each batch runs on stderr of the first rank.

    Args:
        runner: Of the run.
        dataloader: As for mmengine's TestLoop.
        evaluator: As for mmengine's TestLoop.
        fp16: Whether to test and draw under autocast.
        num_samples: Sequences to draw per sample.
        temperature: Divides the logits; below 1 the likely values become likelier.
        top_k: Draw among the k likeliest values only.
        top_p: Draw among the likeliest values of this probability only.
        seed: 0 or larger.
        num_inputs: Draw for the first so many samples of the data set only, over all ranks; the
            others get no ``drawn``. Needs a sampler in the order of the data set.

    Raises:
        UserError: ``num_samples`` or ``num_inputs`` is below 1, or ``seed`` negative.
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
        self.seen = 0  # samples of this rank in the batches before

    def run(self) -> dict:
        """Draw and test; the metrics."""
        self.seen = 0
        return super().run()

    @torch.no_grad()
    def run_iter(self, idx: int, data_batch: dict) -> None:
        """Draw for batch number ``idx``, then test it."""
        inputs, samples = data_batch['inputs'], data_batch['data_samples']
        num = len(samples)
        if self.num_inputs is not None:
            # mmengine deals the samples out in turn: this rank's i-th is i·world_size + rank.
            share = -(-(self.num_inputs - self.runner.rank) // self.runner.world_size)
            num = min(num, max(0, share - self.seen))
        self.seen += len(samples)
        if num:
            # What follows hands the samples on with all that they hold.
            self._draw(idx, inputs[:num], samples[:num])
        super().run_iter(idx, data_batch)

    def _draw(
        self, idx: int, inputs: Sequence[torch.Tensor], samples: Sequence[SequenceSample]
    ) -> None:
        """Give every sample as many tokens as its input has, ``num_samples`` times."""
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
        drawn = tokens.unflatten(0, (len(samples), self.num_samples))
        for sample, own, rows in zip(samples, inputs, drawn, strict=True):
            sample.drawn = rows[:, : len(own)]


@LOOPS.register_module()
class TranslationTestLoop(TestLoop):
    """A test that also translates: every sample of the data set gets the text ``translation``.

    It is found by beam search from the sample's ``source``. Then the test goes on as mmengine's, so
    that a metric finds likelihood and translation in one sample.

    Args:
        runner: Of the run.
        dataloader: As for mmengine's TestLoop, over a data set with ``subwords``.
        evaluator: As for mmengine's TestLoop.
        fp16: Whether to test and translate under autocast.
        beam_size: Hypotheses that are kept at every token; 1 is greedy.
        length_penalty: As for :func:`aft_mm.models.beam_search`; the larger, the longer.

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
        """Translate batch number ``idx``, then test it."""
        samples = data_batch['data_samples']
        with autocast(enabled=self.fp16):
            found = task_model(self.runner).beam_search(
                [sample.source for sample in samples], self.subwords.end, **self.options
            )
        for sample, (best, *_) in zip(samples, found, strict=True):
            sample.set_metainfo(dict(translation=self.subwords.decode(best.tokens.tolist())))
        super().run_iter(idx, data_batch)
