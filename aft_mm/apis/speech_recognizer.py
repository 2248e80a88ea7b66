import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from mmengine.registry import TRANSFORMS, DefaultScope

from aft_mm.checks import check_int, check_path, described
from aft_mm.datasets import StackFrames
from aft_mm.datasets.sound_files import SHIFT
from aft_mm.errors import UserError
from aft_mm.models.decoding import Lexicon, evaluating
from aft_mm.tokenizers import TextUnits

from .loading import Checkpoint, ConfigSource, Device, FilePath, as_list, load_model, pipeline_of


class Recognition(NamedTuple):
    """The result for one file."""

    text: str  # characters, or phonemes separated by spaces
    score: float  # log-probability [nats], of the beam or the best alignment
    alternatives: tuple[tuple[str, float], ...]  # texts and scores, with the best one
    log_probs: np.ndarray  # [T, V]: blank, <unk> and symbols


class SpeechRecognizer:
    """Recognise speech in sound files, Sphinx cepstra or entries of Kaldi archives.

    Each file counts as a speaker of its own.

    Args:
        config: Config of speech recognition with the entry ``units``, or its path.
        words: The only words of the transcripts. ``score`` is then the log-probability of the text.
    """

    def __init__(
        self,
        config: ConfigSource,
        checkpoint: Checkpoint,
        device: Device = None,
        words: Sequence[str] | None = None,
    ) -> None:
        self.config, self.model = load_model(config, checkpoint, device, 'SpeechRecognizer')
        self.units = TextUnits(**self.config.units)
        if len(self.units.names) != self.model.head.num_classes:
            raise UserError(
                f'units of {self.config.filename} must be {self.model.head.num_classes} with '
                f'<blank> and <unk>, the classes of its head, got {len(self.units.names)}'
            )
        self.lexicon = None if words is None else Lexicon.of(words, self.units)
        scope = self.config.get('default_scope', 'mmengine')
        with DefaultScope.overwrite_default_scope(scope):
            self.pipeline = [TRANSFORMS.build(step) for step in pipeline_of(self.config)]

    @property
    def seconds_per_frame(self) -> float:
        """Duration of a row of ``log_probs``."""
        return SHIFT * prod(
            step.num_frames for step in self.pipeline if isinstance(step, StackFrames)
        )

    def __call__(
        self,
        paths: FilePath | Sequence[FilePath],
        beam_size: int | None = None,
        batch_size: int = 8,
    ) -> Recognition | list[Recognition]:
        """Recognise one file or a list of files.

        Args:
            beam_size: Prefixes in the beam; 1 is greedy, None the value of the config.

        Returns:
            A result for a path, a list of results for a list.

        Raises:
            UserError: A file cannot be read, or is longer than the position table.
        """
        files = as_list(paths)
        for path in files:
            check_path('paths', path)
        results = list(self.stream([self.read(path) for path in files], beam_size, batch_size))
        return results[0] if isinstance(paths, str | os.PathLike) else results

    def read(self, path: FilePath) -> dict[str, Any]:
        """Return the sample of a file for :meth:`stream`; raises as :meth:`__call__`."""
        check_path('path', path)
        results: dict[str, Any] = dict(path=os.fspath(path), name=os.fspath(path))
        try:
            for step in self.pipeline:
                results = step.transform(results)
        except ValueError as error:
            raise UserError(str(error)) from error
        limit = getattr(self.model.encoder, 'max_length', None)
        if limit is not None and len(results['inputs']) > limit:
            seconds = limit * self.seconds_per_frame
            raise UserError(
                f'{os.fspath(path)!r} must be at most {seconds:.2f} s long, the '
                f'{self.model.encoder.limited_by} of the model, got '
                f'{len(results["inputs"]) * self.seconds_per_frame:.2f} s; cut it'
            )
        return results

    @torch.no_grad()
    def stream(
        self, samples: Iterable[dict[str, Any]], beam_size: int | None = None, batch_size: int = 8
    ) -> Iterator[Recognition]:
        """Recognise samples of :meth:`read`, of any iterable, batch by batch, see :meth:`__call__`."""
        check_int('batch_size', batch_size, 1)
        if beam_size is not None:
            check_int('beam_size', beam_size, 1)
        rest = iter(samples)
        while part := list(islice(rest, batch_size)):
            for sample in part:
                if not isinstance(sample, dict) or 'inputs' not in sample:
                    raise UserError(f'samples must be those of read(), got {described(sample)}')
            batch = {key: [sample[key] for sample in part] for key in ('inputs', 'data_samples')}
            batch = self.model.data_preprocessor(batch, False)
            with evaluating(self.model):
                log_probs = self.model(**batch, mode='tensor').cpu()
            for rows, sample in zip(log_probs, part, strict=True):
                rows = rows[: len(sample['inputs'])]
                candidates = [
                    (self.units.decode(one.units).strip(), one.score)
                    for one in self.model.decode(rows, beam_size, self.lexicon)
                ]
                yield Recognition(*candidates[0], tuple(candidates), rows.numpy())
