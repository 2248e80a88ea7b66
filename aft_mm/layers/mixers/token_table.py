from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aft_mm.ops.state import check_position, use_up


class TokenTable(NamedTuple):
    """One or more tables [B, N, C] with token t in row t, and the next index [B]."""

    rows: tuple[Tensor, ...]
    position: Tensor

    @classmethod
    def empty(
        cls, batch_size: int, tokens: int, channels: Sequence[int], like: Tensor
    ) -> 'TokenTable':
        """Return a table of `tokens` zero rows per number of channels, with the dtype of `like`."""
        rows = tuple(like.new_zeros(batch_size, tokens, size) for size in channels)
        return cls(rows, torch.zeros(batch_size, dtype=torch.long, device=like.device))

    @property
    def size(self) -> int:
        return self.rows[0].shape[1]

    def store(self, *token: Tensor) -> 'TokenTable':
        """Return the state with one more token, [B, C] per table; overwrites this one."""
        allowed = [(rows.shape[0], rows.shape[2]) for rows in self.rows]
        if [tuple(row.shape) for row in token] != allowed:
            raise ValueError(
                f'tokens of this state must be {allowed}, got {[tuple(row.shape) for row in token]}'
            )
        check_position(self.position, self.size)
        for rows, row in zip(self.rows, token, strict=True):
            index = self.position.view(-1, 1, 1).expand(-1, 1, row.shape[-1])
            rows.scatter_(1, index, row.to(rows.dtype).unsqueeze(1))
        position = self.position + 1
        use_up(self.position)
        return TokenTable(self.rows, position)

    def fill(self, prompt: Sequence[Tensor], lengths: Tensor) -> 'TokenTable':
        """Return the state after prompts [B, L, C] per table, of lengths [B], padding included."""
        tokens = prompt[0].shape[1]
        if tokens > self.size:
            raise ValueError(f'a prompt must have at most {self.size} tokens, got {tokens}')
        for rows, part in zip(self.rows, prompt, strict=True):
            rows[:, :tokens] = part
        return TokenTable(self.rows, lengths.to(self.position, copy=True))
