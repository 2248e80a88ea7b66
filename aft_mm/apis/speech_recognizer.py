"""What was said, by a trained model."""

import os
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from mmengine.config import Config
from mmengine.registry import TRANSFORMS, DefaultScope

from aft_mm.checks import check_int, check_path
from aft_mm.datasets import StackFrames
from aft_mm.datasets.sound_files import SHIFT
from aft_mm.errors import UserError
from aft_mm.tokenizers import TextUnits

from .loading import load_model


class Recognition(NamedTuple):
    """What was recognised in one file."""

    text: str  # characters, or phonemes with a space between
    score: float  # log probability in nats, of the beam or of the best alignment
    alternatives: tuple[tuple[str, float], ...]  # texts and scores, the best one included
    log_probs: np.ndarray  # [T, V] of blank, <unk> and symbols


class SpeechRecognizer:
    """Recognise speech in files: sound, cepstra of Sphinx or places in archives of Kaldi.

    ::

        recognizer = SpeechRecognizer('config.py', 'epoch_60.pth')
        print(recognizer('a.wav').text)
        for found in recognizer(['a.wav', 'b.flac'], beam_size=16):
            print(found.text, found.alternatives)

    A file goes through the pipeline of the test set. Where that normalises per speaker, a file is
    its own speaker.

    Args:
        config: Path of a config of speech recognition, which says its ``units``, or the config
            itself.
        checkpoint: Path or http address of a checkpoint that ``tools/train.py`` wrote.
        device: Where to compute; by default an accelerator if there is one.

    Raises:
        UserError: a file does not exist, the checkpoint is of another model, or the config is
            none of speech.
    """

    def __init__(
        self,
        config: str | os.PathLike | Config,
        checkpoint: str | os.PathLike,
        device: str | torch.device | None = None,
    ) -> None:
        self.config, self.model = load_model(config, checkpoint, device, 'SpeechRecognizer')
        self.units = TextUnits(**self.config.units)
        if len(self.units.names) != self.model.head.num_classes:
            raise UserError(
                f'{self.config.filename} has {len(self.units.names)} units, <blank> '
                f'and <unk> included, but its head has {self.model.head.num_classes}'
            )
        scope = self.config.get('default_scope', 'mmengine')
        with DefaultScope.overwrite_default_scope(scope):
            steps = self.config.test_dataloader.dataset.pipeline
            self.pipeline = [TRANSFORMS.build(step) for step in steps]

    @property
    def seconds_per_frame(self) -> float:
        """Of the rows of ``log_probs``."""
        return SHIFT * prod(
            step.num_frames for step in self.pipeline if isinstance(step, StackFrames)
        )

    def __call__(
        self,
        paths: str | os.PathLike | Sequence[str | os.PathLike],
        beam_size: int | None = None,
        batch_size: int = 8,
    ) -> Recognition | list[Recognition]:
        """Recognise one file, or a list of them in their order.

        Args:
            paths: The file, or a list.
            beam_size: Prefixes that are kept; 1 is greedy, None what the config says.
            batch_size: Files that are computed together.

        Raises:
            UserError: a file cannot be read, or is longer than the model reads.
            ValueError: a number is out of range.
        """
        if isinstance(paths, str | os.PathLike):
            return self([paths], beam_size, batch_size)[0]
        return list(self.stream([self.read(path) for path in paths], beam_size, batch_size))

    def read(self, path: str | os.PathLike) -> dict:
        """The sample of a file, for :meth:`stream`; raises UserError as calling does."""
        check_path('path', path)
        results: dict = dict(path=os.fspath(path), name=os.fspath(path))
        try:
            for step in self.pipeline:
                results = step.transform(results)
        except ValueError as error:
            raise UserError(str(error)) from error
        limit = getattr(self.model.encoder, 'max_length', None)
        if limit is not None and len(results['inputs']) > limit:
            seconds = limit * self.seconds_per_frame
            raise UserError(
                f'{os.fspath(path)!r} must not be longer than {seconds:.2f} s, the '
                f'position table of the model, got '
                f'{len(results["inputs"]) * self.seconds_per_frame:.2f} s; cut it'
            )
        return results

    @torch.no_grad()
    def stream(
        self, samples: Sequence[dict], beam_size: int | None = None, batch_size: int = 8
    ) -> Iterator[Recognition]:
        """Recognise what :meth:`read` gave, batch by batch; raises as calling does."""
        check_int('batch_size', batch_size, 1)
        if beam_size is not None:
            check_int('beam_size', beam_size, 1)
        for start in range(0, len(samples), batch_size):
            part = samples[start : start + batch_size]
            batch = {key: [sample[key] for sample in part] for key in ('inputs', 'data_samples')}
            batch = self.model.data_preprocessor(batch, False)
            log_probs = self.model(**batch, mode='tensor').cpu()
            for rows, sample in zip(log_probs, part, strict=True):
                rows = rows[: len(sample['inputs'])]
                found = [
                    (self.units.decode(one.units), one.score)
                    for one in self.model.decode(rows, beam_size)
                ]
                yield Recognition(*found[0], tuple(found), rows.numpy())
