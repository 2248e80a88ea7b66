"""Tours through points: an encoder of points, and a decoder that points to the next one.

The encoder is a stack of blocks. With `mixer='aft'` it is AFT-full whose position bias is the
negative scaled distance of the points of each instance; with `mixer='softmax'` it is multi-head
attention, which has coordinates only. The decoder reads the points that are not visited yet with
the same kind of mixer, and compares the result with each of them.
"""

import itertools
import math
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm import ops
from aft_mm.layers import Block

MIXERS = ('aft', 'softmax')
# Logits are in (−CLIP, CLIP), so that sampling never stops early.
CLIP = 10.0


class Encoded(NamedTuple):
    """Data of the points of B instances that the decoder reads."""

    first: Tensor  # [B, N, D], part of the query of the point where the tour starts
    last: Tensor  # [B, N, D], part of the query of the last point
    key: Tensor  # [B, N, D]
    value: Tensor  # [B, N, D]
    target: Tensor  # [B, N, D], compared with the mixed values
    nearness: Tensor  # [B, N, N], negative scaled distances
    demand: Tensor | None = None  # [B, N], see `problems.py`


def negative(distances: Tensor) -> Tensor:
    """Return ``−log2(N) · distances`` [B, N, N].

    Neighbours are closer in larger instances; the factor keeps the weights of the nearest similar.
    """
    return -math.log2(distances.shape[1]) * distances


def tour_lengths(points: Tensor, tours: Tensor) -> Tensor:
    """Return the lengths [B, P] of closed tours [B, P, N] through points [B, N, 2]."""
    batch = torch.arange(len(points))[:, None, None]
    places = points[batch, tours]
    return (places - places.roll(1, 2)).norm(dim=-1).sum(-1)


class TourModel(nn.Module):
    """Encoder and decoder.

    Args:
        mixer: 'aft' or 'softmax'.
        embed_dims: channels D.
        num_layers: blocks of the encoder.
        num_heads: heads; with AFT each head of the encoder scales the distances by its own factor.
    """

    features: ClassVar[int] = 2  # numbers of a point

    def __init__(
        self, mixer: str, embed_dims: int = 64, num_layers: int = 3, num_heads: int = 4
    ) -> None:
        super().__init__()
        if mixer not in MIXERS:
            raise ValueError(f'mixer must be one of {", ".join(MIXERS)}, got {mixer!r}')
        self.mixer, self.embed_dims, self.num_heads = mixer, embed_dims, num_heads
        scales = [2.0**n for n in range(num_heads)]
        token_mixer = dict(type='aft_mm.SoftmaxAttention', num_heads=num_heads)
        if mixer == 'aft':
            token_mixer = dict(type='aft_mm.AFTBias', scales=scales)
            self.scale = nn.Parameter(torch.ones(()))
        self.embedding = nn.Linear(self.features, embed_dims)
        self.layers = nn.ModuleList(Block(embed_dims, token_mixer) for _ in range(num_layers))
        self.norm = nn.LayerNorm(embed_dims)
        self.project = nn.Linear(embed_dims, 5 * embed_dims, bias=False)
        self.out = nn.Linear(embed_dims, embed_dims)
        self.distance_scale = nn.Parameter(torch.ones(()))

    @staticmethod
    def sample(batch: int, points: int) -> Tensor:
        """Return random instances, uniform points [B, N, 2] in the unit square."""
        return torch.rand(batch, points, 2)

    @staticmethod
    def costs(points: Tensor, tours: Tensor) -> Tensor:
        """Return the cost [B, P] of each tour."""
        return tour_lengths(points, tours)

    def encode(self, points: Tensor) -> Encoded:
        """Encode points [B, N, 2]."""
        return self._encode(points, torch.cdist(points, points))

    def _encode(self, features: Tensor, distances: Tensor) -> Encoded:
        """Encode nodes; every second layer reads the distances to a node, others those from it."""
        nearness = negative(distances)
        x = self.embedding(features)
        for layer, bias in zip(self.layers, itertools.cycle((nearness, nearness.mT)), strict=False):
            x = layer(x, **(dict(position_bias=bias) if self.mixer == 'aft' else {}))
        return Encoded(*self.project(self.norm(x)).chunk(5, -1), nearness)

    def logits(
        self,
        encoded: Encoded,
        first: Tensor,
        last: Tensor,
        open_: Tensor,
        extra: Tensor | float = 0.0,
    ) -> Tensor:
        """Return the logits [B, R, N] of the next point of R partial tours per instance.

        Args:
            encoded: from :meth:`encode`.
            first: index of the first point [B, R].
            last: index of the last point [B, R].
            open_: bool [B, R, N], True for points that are not visited yet.
            extra: [B, R, D], added to the queries.
        """
        batch = torch.arange(len(first))[:, None]
        query = encoded.first[batch, first] + encoded.last[batch, last] + extra
        nearness = encoded.nearness[batch, last]
        if self.mixer == 'aft':
            bias = self.scale * nearness
            mixed = ops.aft_full(query, encoded.key, encoded.value, bias, pair_mask=open_)
        else:
            parts = (query, encoded.key, encoded.value)
            heads = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in parts)
            mixed = F.scaled_dot_product_attention(*heads, attn_mask=open_.unsqueeze(1))
            mixed = mixed.transpose(1, 2).flatten(2)
        similar = (self.out(mixed) + query) @ encoded.target.mT / math.sqrt(self.embed_dims)
        scores = CLIP * torch.tanh((similar + self.distance_scale * nearness) / CLIP)
        return scores.masked_fill(~open_, -torch.inf)

    @torch.no_grad()
    def roll_out(self, encoded: Encoded, starts: Tensor, sample: bool) -> Tensor:
        """Return a tour [B, P, N] from each of the starts [B, P], sampled or greedy."""
        batch, count = starts.shape
        open_ = torch.ones(batch, count, encoded.key.shape[1], dtype=torch.bool)
        tour = [starts]
        while True:
            open_.scatter_(2, tour[-1].unsqueeze(-1), False)
            if len(tour) == open_.shape[2]:
                return torch.stack(tour, -1)
            scores = self.logits(encoded, starts, tour[-1], open_)
            if sample:  # the Gumbel trick
                scores -= torch.empty_like(scores).exponential_().log_()
            tour.append(scores.argmax(-1))

    def log_probabilities(self, encoded: Encoded, tours: Tensor) -> Tensor:
        """Return the log-probability [B, P] of tours [B, P, N] given their starts.

        All steps of all tours are computed at once, as the tours are known: the rows of the mixer
        are the P·(N − 2) partial tours from which there is a choice.
        """
        place = tours.argsort(-1)
        step = torch.arange(tours.shape[2] - 2)
        open_ = (place.unsqueeze(2) > step[:, None]).flatten(1, 2)
        last, chosen = tours[..., :-2], tours[..., 1:-1]
        first = tours[..., :1].expand_as(last)
        scores = self.logits(encoded, first.flatten(1), last.flatten(1), open_)
        chosen = chosen.flatten(1).unsqueeze(-1)
        log_probabilities = scores.log_softmax(-1).gather(-1, chosen).squeeze(-1)
        return log_probabilities.unflatten(1, (tours.shape[1], -1)).sum(-1)
