from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch

from aft_mm.checks import check_int
from aft_mm.errors import UserError

from .loading import ConfigSource, Device, FilePath, as_list, check_options, load_model


class TextGenerator:
    """Continue text and score it, byte by byte."""

    def __init__(self, config: ConfigSource, checkpoint: FilePath, device: Device = None) -> None:
        self.config, self.model = load_model(config, checkpoint, device, 'TextGenerator')

    @overload
    def __call__(
        self, prompt: str | None = None, num_chars: int | None = None, **options: Any
    ) -> str: ...

    @overload
    def __call__(
        self,
        prompt: list[str] | tuple[str, ...],
        num_chars: int | None = None,
        **options: Any,
    ) -> list[str]: ...

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        num_chars: int | None = None,
        **options: Any,
    ) -> str | list[str]:
        """Continue a prompt, or each prompt of a list.

        Args:
            prompt: A text, or a list of texts of any lengths; None starts from nothing.
            num_chars: Bytes to sample, by default as many as the position table holds; invalid ones
                become U+FFFD.
            **options: Those of :func:`aft_mm.models.generate`.

        Returns:
            The prompt followed by the sampled bytes; a list for a list of prompts.
        """
        if num_chars is not None:
            check_int('num_chars', num_chars, 1)
        options = {'progress': True, **options}
        check_options(options)
        if prompt is None:
            return decode(self.model.generate(self._length(0, num_chars), **options)[0])
        texts = self._texts('prompt', prompt, '; None starts from nothing')
        prompts = [torch.tensor(list(text.encode()), dtype=torch.int64) for text in texts]
        longest = max(map(len, prompts))
        length = self._length(longest, num_chars)
        tokens = self.model.generate(length, prompts=prompts, **options)
        results = [
            decode(row[: len(given) + length - longest])
            for row, given in zip(tokens, prompts, strict=True)
        ]
        return results[0] if isinstance(prompt, str) else results

    @torch.no_grad()
    def score(self, text: str | Sequence[str]) -> np.ndarray | list[np.ndarray]:
        """Compute ``log p(byte | previous bytes)`` of a text, or of each text of a list.

        Returns:
            float64 [bytes] in nats; a list for a list of texts.

        Raises:
            ValueError: A text is empty or not a str, or exceeds the position table.
        """
        texts = self._texts('text', text)
        device = next(self.model.parameters()).device
        scores = []
        for given in texts:
            tokens = torch.tensor([list(given.encode())], device=device)
            limit = self.model.decoder.max_length
            if tokens.shape[1] > limit:
                raise UserError(
                    f"text must be at most {limit} bytes, the model's {self.model.decoder.limited_by}, "
                    f'got {tokens.shape[1]}'
                )
            nats = self.model.head.nats(self.model.decoder(tokens), tokens, dtype=torch.float64)
            scores.append(-nats[0].cpu().numpy())
        return scores[0] if isinstance(text, str) else scores

    @staticmethod
    def _texts(name: str, text: str | Sequence[str], hint: str = '') -> list[str]:
        texts = as_list(text, str, bytes)
        if not texts or not all(isinstance(part, str) and part for part in texts):
            raise UserError(
                f'{name} must be a str of at least one character, or a list of such, '
                f'got {text!r}{hint}'
            )
        return texts

    def _length(self, longest: int, num_chars: int | None) -> int:
        limit = self.model.decoder.max_length
        if longest + (num_chars or 1) > limit:
            wanted = 'at least 1' if num_chars is None else num_chars
            raise UserError(
                f'prompt and num_chars must be at most {limit} bytes together, the '
                f"model's {self.model.decoder.limited_by}, got {longest} and {wanted}"
            )
        return longest + num_chars if num_chars else limit


def decode(tokens: torch.Tensor) -> str:
    return bytes(tokens.tolist()).decode(errors='replace')
