"""What a mixer without a shorter state keeps: something of every token, by its index."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aft_mm.ops.state import check_position, use_up


class TokenTable(NamedTuple):
    """Rows [B, N, C] of one or more kinds, token t in row t, and the next index [B]."""

    rows: tuple[Tensor, ...]
    position: Tensor

    @classmethod
    def empty(
        cls, batch_size: int, tokens: int, channels: Sequence[int], like: Tensor
    ) -> 'TokenTable':
        """Room for `tokens` rows of each number of channels, device and type of `like`."""
        rows = tuple(like.new_zeros(batch_size, tokens, size) for size in channels)
        return cls(rows, torch.zeros(batch_size, dtype=torch.long, device=like.device))

    @property
    def size(self) -> int:
        """N."""
        return self.rows[0].shape[1]

    def store(self, *token: Tensor) -> 'TokenTable':
        """With one token more, [B, C] of each kind, in place.

        Uses this one up. Raises ValueError for a token of another batch or size and, on a CPU only,
        past the last row or for a used one: a look at it would wait for a device.
        """
        allowed = [(rows.shape[0], rows.shape[2]) for rows in self.rows]
        if [tuple(row.shape) for row in token] != allowed:
            raise ValueError(
                f'tokens of this state must be {allowed} as it was made for, got '
                f'{[tuple(row.shape) for row in token]}'
            )
        check_position(self.position)
        look = self.position.device.type == 'cpu' and not torch.compiler.is_compiling()
        if look and (self.position >= self.size).any():
            raise ValueError(f'the state holds {self.size} tokens, got one more')
        for rows, row in zip(self.rows, token, strict=True):
            index = self.position.view(-1, 1, 1).expand(-1, 1, row.shape[-1])
            rows.scatter_(1, index, row.to(rows.dtype).unsqueeze(1))
        position = self.position + 1
        use_up(self.position)
        return TokenTable(self.rows, position)

    def fill(self, prompt: Sequence[Tensor], lengths: Tensor) -> 'TokenTable':
        """With prompts [B, L, C] of each kind; rows from lengths [B] on are overwritten later.

        Raises ValueError for a prompt longer than the table.
        """
        tokens = prompt[0].shape[1]
        if tokens > self.size:
            raise ValueError(f'a prompt must have at most {self.size} tokens, got {tokens}')
        for rows, part in zip(self.rows, prompt, strict=True):
            rows[:, :tokens] = part
        return TokenTable(self.rows, lengths.to(self.position, copy=True))
