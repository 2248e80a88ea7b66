"""Graphs of the sequence models: decoders with a state, and CTC models."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from aft_mm.errors import UserError
from aft_mm.layers.block import kinds_of
from aft_mm.layers.mixers import TokenMixer
from aft_mm.layers.mixers.aft_conv import AFTConv
from aft_mm.layers.mixers.aft_full import AFTFull
from aft_mm.layers.mixers.aft_local import AFTLocal
from aft_mm.layers.mixers.aft_local_hard import AFTLocalHard
from aft_mm.layers.mixers.aft_local_learned import AFTLocalLearned
from aft_mm.layers.mixers.aft_simple import AFTSimple
from aft_mm.layers.mixers.lsh_attention import LSHAttention
from aft_mm.layers.mixers.lstm import LSTM
from aft_mm.layers.mixers.softmax_attention import KeyValueCache, SoftmaxAttention
from aft_mm.models.block_stack import BlockStack
from aft_mm.models.decoding.step_graph import map_leaves

from .graphs import Call, Graph

# torch cannot trace the first, and padding is part of the groups of the second.
OF_ONE_LENGTH = (LSTM, LSHAttention)
STEPPED = (
    AFTConv,
    AFTFull,
    AFTLocal,
    AFTLocalHard,
    AFTLocalLearned,
    AFTSimple,
    SoftmaxAttention,
)
# Graphs of other mixers, and of causal AFT, have a fixed length and pad their input to it.
ANY_LENGTH = (AFTSimple, SoftmaxAttention)
CHECKED_STEPS = 4


def mixers_of(stack: BlockStack) -> list[TokenMixer]:
    return [layer.token_mixer for layer in stack.layers]


def all_of(stack: BlockStack, kinds: type | tuple[type, ...]) -> bool:
    return all(isinstance(mixer, kinds) for mixer in mixers_of(stack))


def pad_tokens(x: Tensor, length: int) -> Tensor:
    return torch.cat([x, x.new_zeros(x.shape[0], length, *x.shape[2:])], 1)[:, :length]


class Encoder(nn.Module):
    """``(tokens, mask) -> [B, S, D]`` for any S; with `pad`, S is that of the position table."""

    def __init__(self, encoder: BlockStack) -> None:
        super().__init__()
        self.encoder = encoder
        self.pad = not all_of(encoder, ANY_LENGTH)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if self.pad:
            length = self.encoder.max_length
            tokens, mask = pad_tokens(tokens, length), pad_tokens(mask, length)
        return self.encoder(tokens, mask), mask


class CTC(nn.Module):
    """``(frames [B, T, F], mask [B, T]) -> log_probs [B, T, V]``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(model.encoder), model.head

    def forward(self, frames: Tensor, mask: Tensor) -> tuple[Tensor]:
        hidden, _ = self.encoder(frames, mask)
        # A slice would have other strides at the full length, which a graph may not depend on.
        frame = torch.arange(frames.shape[1])
        return (self.head.log_probs(hidden).index_select(1, frame),)


def leaves_of(state: Any, name: str = '') -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested tuples and lists, with names such as 'blocks.0.mixing.key'."""
    if not isinstance(state, tuple | list):
        yield name, state
        return
    for key, part in zip(getattr(state, '_fields', range(len(state))), state, strict=True):
        yield from leaves_of(part, f'{name}.{key}' if name else str(key))


class StateLayout:
    """The tensors of a decoder's state, by name, without what follows from the others."""

    def __init__(self, state: Any, length: int) -> None:
        self.state, leaves = state, dict(leaves_of(state))
        self.offsets = {
            name: int(leaf[0]) - length
            for name, leaf in leaves.items()
            if name.split('.')[-1] == 'position'
        }
        stored = [
            name
            for name, leaf in leaves.items()
            # Others are unused buffers, or constants such as the bias of AFT-full.
            if isinstance(leaf, Tensor) and leaf.numel() and len(leaf) == 1
            if name not in self.offsets
        ]
        self.names = [*(name for name in stored if 'memory' not in name), 'position']
        self.memory_names = [name for name in stored if 'memory' in name]

    def flatten(self, state: Any) -> tuple[Tensor, ...]:
        leaves = dict(leaves_of(state))
        return tuple(leaves[name] for name in (*self.names, *self.memory_names))

    def build(self, parts: Sequence[Tensor]) -> Any:
        given = dict(zip([*self.names, *self.memory_names], parts, strict=True))
        position = given.pop('position')
        leaves = {
            name: given[name].clone() if name in given else x for name, x in leaves_of(self.state)
        }
        # Positions of blocks count the start.
        leaves |= {name: position + offset for name, offset in self.offsets.items()}
        values = iter(leaves.values())
        return map_leaves(lambda _: next(values), self.state)


def without_counts(state: Any) -> Any:
    def fill(x: Any) -> Any:
        return x._replace(used=0) if isinstance(x, KeyValueCache) else x

    return map_leaves(fill, state, (KeyValueCache,))


def with_room(state: Any) -> Any:
    def grow(x: Any) -> Any:
        if not isinstance(x, KeyValueCache):
            return x
        key, value = (F.pad(part, (0, 0, 0, 1)) for part in (x.key, x.value))
        return x._replace(key=key, value=value, used=x.key.shape[2])

    return map_leaves(grow, state, (KeyValueCache,))


class Prompt(nn.Module):
    """``(tokens [1, L], source and its mask if any) -> (scores [1, V], *state)``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.encoder = None if model.encoder is None else Encoder(model.encoder)
        self.pad = not all_of(model.decoder, SoftmaxAttention)
        self.layout: StateLayout | None = None

    def forward(self, tokens: Tensor, *source: Tensor) -> tuple[Tensor, ...]:
        decoder, length = self.model.decoder, tokens.shape[1]
        lengths = torch.full((1,), length, dtype=torch.long)
        if self.pad:
            tokens = pad_tokens(tokens, decoder.max_length - 1)
        memory = () if self.encoder is None else self.encoder(*source)
        hidden, state = decoder.prefill(tokens, lengths, *memory)
        state = without_counts(state)
        if self.layout is None:
            self.layout = StateLayout(state, length)
        return (self.model.head.logits(hidden), *self.layout.flatten(state))


class Step(nn.Module):
    """``(token [1], *state, *memory) -> (scores [1, V], *state)``."""

    def __init__(self, model: Any, layout: StateLayout) -> None:
        super().__init__()
        self.model, self.layout = model, layout

    def forward(self, token: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        hidden, after = self.model.decoder.step(token, with_room(self.layout.build(state)))
        changed = self.layout.flatten(without_counts(after))[: len(self.layout.names)]
        return (self.model.head.logits(hidden), *changed)


class Decoder:
    def __init__(self, model: Any, config: str) -> None:
        check_decoder(model, config)
        self.model, self.vocabulary = model, model.head.num_values
        self.longest = model.decoder.max_length - 1
        self.about = f'tokens [1, 0 to {self.longest}] to scores and state'

    @cached_property
    def graphs(self) -> list[Graph]:
        prompt, encoder, longest = Prompt(self.model), self.model.encoder, self.longest
        inputs = self.random_inputs(min(3, longest))
        axes: list[dict[int, Any]] = [{1: Dim('length', min=0, max=longest)}]
        source: dict[int, Any] = {}
        if encoder is not None:
            source = {1: Dim('source_length', min=1, max=encoder.max_length)}
            axes += [source, source]
        with torch.no_grad():
            _, *state = prompt(*inputs.values())
        layout = prompt.layout
        assert layout is not None  # the call made it
        names = [*layout.names, *layout.memory_names]
        metadata = dict(longest_prompt=longest)
        first = Graph('prompt', prompt, inputs, ['scores', *names], axes, metadata)
        cached = {} if prompt.pad else {2: Dim('cached', min=1, max=longest)}
        memory = {} if prompt.encoder is None or prompt.encoder.pad else source
        axes = [{}, *[cached] * (len(layout.names) - 1), {}]
        axes += [memory] * len(layout.memory_names)
        inputs = dict(token=torch.randint(self.vocabulary, (1,)))
        inputs.update(zip(names, state, strict=True))
        outputs = ['scores', *(f'next.{name}' for name in layout.names)]
        return [first, Graph('step', Step(self.model, layout), inputs, outputs, axes)]

    def random_inputs(self, length: int) -> dict[str, Tensor]:
        inputs = dict(tokens=torch.randint(self.vocabulary, (1, length)))
        if (encoder := self.model.encoder) is not None:
            size = min(length + 3, encoder.max_length)
            inputs['source'] = torch.randint(encoder.embedding.num_values, (1, size))
            inputs['source_mask'] = torch.arange(size)[None] < max(size - 1, 1)
        return inputs

    def cases(self, calls: Mapping[str, Call]) -> Iterator[tuple[str, Tensor, Tensor]]:
        decoder, encoder, head = self.model.decoder, self.model.encoder, self.model.head
        prompt, step = self.graphs
        lengths = {2, 0, 1, min(7, self.longest), max(self.longest - CHECKED_STEPS, 0)}
        for length in sorted(lengths):
            inputs = self.random_inputs(length)
            steps = min(CHECKED_STEPS, self.longest - length)
            tokens = torch.cat(
                [inputs['tokens'], torch.randint(self.vocabulary, (1, steps + 1))], 1
            )
            memory: tuple[Tensor, ...] = ()
            if encoder is not None:
                mask = inputs['source_mask']
                memory = encoder(inputs['source'], mask), mask
            expected = head.logits(decoder(tokens, *memory))
            state = dict(zip(prompt.outputs, calls['prompt'](inputs), strict=True))
            yield f'prompt of {length} tokens', expected[:, length], state.pop('scores')
            for position in range(length, length + steps):
                outputs = calls['step']({'token': tokens[:, position], **state})
                new = dict(zip(step.outputs, outputs, strict=True))
                scores = new.pop('scores')
                yield f'step after {position} tokens', expected[:, position + 1], scores
                state.update({name.removeprefix('next.'): x for name, x in new.items()})


class Transcriber:
    def __init__(self, model: Any, config: str) -> None:
        check_encoder(model.encoder, config)
        self.model, self.longest = model, model.encoder.max_length
        axes = {0: Dim('batch', min=1), 1: Dim('frames', min=1, max=self.longest)}
        inputs = self.random_inputs(2, min(9, self.longest))
        self.graphs = [Graph('', CTC(model), inputs, ['log_probs'], [axes, axes])]
        self.about = f'frames [B, 1 to {self.longest}, F] to log_probs'

    def random_inputs(self, batch: int, length: int) -> dict[str, Tensor]:
        features = self.model.encoder.embedding.projection.in_features
        lengths = torch.randint(1, length + 1, (batch, 1))
        lengths[0] = length
        mask = torch.arange(length) < lengths
        return dict(frames=torch.randn(batch, length, features), mask=mask)

    def cases(self, calls: Mapping[str, Call]) -> Iterator[tuple[str, Tensor, Tensor]]:
        for batch, length in enumerate(sorted({1, 2, min(23, self.longest), self.longest}), 1):
            inputs = self.random_inputs(batch, length)
            frames, mask = inputs.values()
            expected = self.model.head.log_probs(self.model.encoder(frames, mask))
            yield f'batch of {length} frames', expected[mask], calls[''](inputs)[0][mask]


def check_decoder(model: Any, config: str) -> None:
    if not hasattr(model.head, 'logits') or model.head.token_shape:
        raise UserError(
            f'the head of {config} must be aft_mm.CategoricalHead, got {type(model.head).__name__}'
        )
    mixers = mixers_of(model.decoder)
    for mixer in mixers:
        if not isinstance(mixer, STEPPED) or not getattr(mixer, 'stateful', True):
            allowed = ', '.join(kind.__name__ for kind in STEPPED)
            raise UserError(
                f'the mixer of {config} must be one of {allowed}, with a state, '
                f'got {type(mixer).__name__}'
            )
    # The graph of softmax attention has a cache that grows, those of others pad the prompt.
    if len({isinstance(mixer, SoftmaxAttention) for mixer in mixers}) > 1:
        raise UserError(
            f'SoftmaxAttention of {config} must be in all blocks or none, got {kinds_of(mixers)}'
        )
    check_encoder(model.encoder, config)


def check_encoder(encoder: Any, config: str) -> None:
    if encoder is None:
        return
    if not isinstance(encoder, BlockStack):
        raise UserError(
            f'the encoder of {config} must be aft_mm.SequenceEncoder, got {type(encoder).__name__}'
        )
    for mixer in mixers_of(encoder):
        if isinstance(mixer, OF_ONE_LENGTH):
            raise UserError(
                f'the mixer of the encoder of {config} must be one whose graph reads inputs of any '
                f'length, got {type(mixer).__name__}'
            )
