"""The contract of token mixers, as tests for pytest.

A package with mixers of its own has a subclass of :class:`MixerContract` for each
(docs/tutorials/own_mixer.md).
"""

import functools
import inspect
import itertools
import unittest
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from aft_mm.layers import TokenMixer
from aft_mm.registry import MODELS

__all__ = ['BATCH', 'CHANNELS', 'MixerContract', 'check_steps', 'tokens']

CHANNELS, BATCH = 12, 2

_refuses = unittest.TestCase().assertRaisesRegex
close = torch.testing.assert_close


def tokens(grid: Sequence[int]) -> Tensor:
    return torch.randn(BATCH, prod(grid), CHANNELS)


def check_steps(
    mixer: TokenMixer, x: Tensor, lengths: Sequence[int] | None = None, **tolerance: Any
) -> Any:
    """Compare steps after prompts of these lengths, or from an empty state, with the forward."""
    expected, each, prompt = mixer(x), torch.arange(len(x)), 0
    given = torch.zeros(len(x), dtype=torch.long)
    if lengths is None:
        state = mixer.init_state(len(x))
    else:
        given = torch.tensor(lengths).clamp_max(x.shape[1] - 1)
        prompt = int(given.max()) or 1
        kept = torch.arange(prompt) < given[:, None]
        y, state = mixer.prefill(x[:, :prompt].masked_fill(~kept[..., None], torch.nan), given)
        close(y[kept], expected[:, :prompt][kept], **tolerance)
    for n in range(x.shape[1] - prompt):
        y_t, state = mixer.step(x[each, given + n], state)
        close(y_t, expected[each, given + n], **tolerance)
        close(state.position, given + n + 1)
    return state


def _every(*names: str) -> Callable[[Callable[..., None]], Callable[[Any], None]]:
    """Call a test for all values of attributes, each with seed 0; its error says for which."""

    def decorate(test: Callable[..., None]) -> Callable[[Any], None]:
        @functools.wraps(test)
        def run(self: Any) -> None:
            for values in itertools.product(*(getattr(self, name) for name in names)):
                torch.manual_seed(0)
                try:
                    test(self, *values)
                except Exception as error:
                    error.add_note(f'with {dict(zip(names, values, strict=True))}')
                    raise

        del run.__wrapped__  # pytest would take the values for fixtures
        return run

    return decorate


class MixerContract:
    """Tests of a mixer; a subclass whose name begins with Test sets `mixer`.

    Tests of what the class says it does not do (``can_be_causal``, ``normalized``, ``takes_memory``,
    ``takes_prefix_tokens``, steps) are left out.
    """

    mixer: ClassVar[type[TokenMixer]]
    #: Arguments in addition to embed_dims=12 and the grid; the mixer's `example` by default.
    arguments: ClassVar[dict[str, Any] | None] = None
    #: Whether the weights of visible tokens sum to one; the mixer's attribute by default.
    normalized: ClassVar[bool | None] = None
    grid: ClassVar[Sequence[Sequence[int]]] = ((1,), (7,), (3, 5), (6, 1))
    #: Parameters without influence on the output, as a constant added to all keys has none.
    cancelling: ClassVar[Sequence[str]] = ('key.bias', 'key_norm.bias')
    #: Whether steps sum in another order than the forward, and may round to the next bfloat16.
    steps_round: ClassVar[bool] = False
    lengths: ClassVar[Sequence[Sequence[int] | None]] = (None, (0, 3), (1, 1), (6, 2))
    causal: ClassVar[Sequence[bool]] = (False, True)

    def __init_subclass__(cls) -> None:
        mixer = cls.mixer
        if cls.normalized is None:
            cls.normalized = mixer.normalized
        has_steps = mixer.can_be_causal and mixer._mix_step is not TokenMixer._mix_step
        if not mixer.can_be_causal:
            cls.causal = (False,)
        for applies, name in (
            (mixer.can_be_causal, 'test_causal_outputs_do_not_depend_on_later_tokens'),
            (cls.normalized, 'test_weights_sum_to_one'),
            (has_steps, 'test_steps_equal_the_parallel_forward'),
            (has_steps, 'test_steps_of_a_float64_model_are_float64'),
            (mixer.takes_memory, 'test_keys_and_values_come_from_the_memory'),
            (mixer.takes_prefix_tokens, 'test_prefix_tokens_precede_the_grid'),
        ):
            if not applies:
                setattr(cls, name, None)

    @classmethod
    def build(cls, grid: Sequence[int] = (7,), **options: Any) -> TokenMixer:
        """Build the mixer with random parameters, so that no error is hidden by a zero."""
        arguments = cls.mixer.example if cls.arguments is None else cls.arguments
        arguments = {**arguments, **options}
        required = [
            p.name
            for p in list(inspect.signature(cls.mixer.__init__).parameters.values())[2:]
            if p.default is p.empty and p.kind is not p.VAR_KEYWORD and p.name not in arguments
        ]
        if required:
            raise TypeError(
                f'{cls.mixer.__name__} must have a class attribute `example`, a dict of small '
                f'values for its required arguments {", ".join(required)} with '
                f'embed_dims={CHANNELS}'
            )
        mixer = cls.mixer(**{'embed_dims': CHANNELS, 'grid': grid, **arguments})
        for parameter in mixer.parameters():
            nn.init.normal_(parameter, std=0.5)
        return mixer

    def test_configs_find_it(self) -> None:
        assert MODELS.get(self.mixer.__name__) is self.mixer

    @_every('grid', 'causal')
    def test_output_has_the_input_shape_and_every_parameter_gets_a_gradient(
        self, grid: Sequence[int], causal: bool
    ) -> None:
        mixer = self.build(grid, causal=causal)
        x = tokens(grid).requires_grad_()
        y = mixer(x)
        assert y.shape == x.shape, f'the output is {list(y.shape)}, the input {list(x.shape)}'
        bias = mixer.position_bias()
        if bias is not None and bias.shape != (1, x.shape[1], x.shape[1]):
            heads, *kernel = bias.shape
            assert CHANNELS % heads == 0 and all(size % 2 for size in kernel), (
                f'position_bias() is {list(bias.shape)}, not [1, T, T] or [heads, *kernel]'
            )
        (y * torch.randn_like(y)).sum().backward()
        for path, parameter in mixer.named_parameters():
            assert parameter.grad is not None, f'{path} gets no gradient'
            assert parameter.grad.isfinite().all(), f'the gradient of {path} is not finite'
            if x.shape[1] > 7 and path not in self.cancelling:
                assert parameter.grad.abs().max() > 1e-6, f'the gradient of {path} is 0'

    @_every('grid')
    def test_causal_outputs_do_not_depend_on_later_tokens(self, grid: Sequence[int]) -> None:
        mixer = self.build(grid, causal=True)
        x = tokens(grid).requires_grad_()
        t = x.shape[1] // 2
        y = mixer(x)
        (gradient,) = torch.autograd.grad(y[:, : t + 1].square().sum(), x)
        assert (gradient[:, t + 1 :] == 0).all(), 'a later token gets a gradient'
        assert (gradient[:, t] != 0).any(), 'a token gets no gradient'
        changed = x.detach().clone()
        changed[:, t + 1 :] += 1e4
        close(mixer(changed)[:, : t + 1], y[:, : t + 1])

    @_every('grid', 'causal')
    def test_weights_sum_to_one(self, grid: Sequence[int], causal: bool) -> None:
        mixer: Any = self.build(grid, causal=causal)
        nn.init.zeros_(mixer.value.weight)
        x = tokens(grid)
        gated = getattr(mixer, 'gate', None) == 'sigmoid'
        gate = mixer.query(x).sigmoid() if gated else torch.ones_like(x)
        close(mixer(x), mixer.proj(gate * mixer.value.bias))

    @_every('lengths', 'grid')
    def test_steps_equal_the_parallel_forward(
        self, lengths: Sequence[int] | None, grid: Sequence[int]
    ) -> None:
        """Also after prompts of different lengths."""
        mixer = self.build(grid, causal=True).eval()
        check_steps(mixer, tokens(grid), lengths, atol=1e-5, rtol=1e-4)

    def test_steps_of_a_float64_model_are_float64(self) -> None:
        torch.manual_seed(0)
        grid = self.grid[2]
        mixer, x = self.build(grid, causal=True).double().eval(), tokens(grid).double()
        check_steps(mixer, x, atol=1e-12, rtol=1e-10)

    @_every('causal')
    def test_padding_has_no_influence_and_no_gradient(self, causal: bool) -> None:
        mixer = self.build((9,), causal=causal)
        short = torch.randn(1, 6, CHANNELS)
        padded = torch.full((1, 9, CHANNELS), torch.nan)
        padded[:, :6] = short
        padded.requires_grad_()
        mask = torch.arange(9)[None] < 6
        y = mixer(padded, key_mask=mask)[:, :6]
        close(y, mixer(short))
        y.square().sum().backward()
        assert padded.grad is not None and (padded.grad[:, 6:] == 0).all(), (
            'padding gets a gradient'
        )
        for path, parameter in mixer.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), path

    @_every('causal')
    def test_an_empty_batch_stays_empty(self, causal: bool) -> None:
        mixer, x = self.build(causal=causal).eval(), torch.zeros(0, 7, CHANNELS)
        for mask in (None, torch.zeros(0, 7, dtype=torch.bool)):
            assert mixer(x, key_mask=mask).shape == x.shape
        if causal and mixer.has_steps:
            y, state = mixer.prefill(x[:, :3], torch.zeros(0, dtype=torch.long))
            assert y.shape == (0, 3, CHANNELS)
            assert mixer.step(x[:, 3], state)[0].shape == (0, CHANNELS)

    @_every('causal')
    def test_a_token_that_sees_no_token_gets_zero(self, causal: bool) -> None:
        mixer = self.build(causal=causal)
        x = torch.full((1, 7, CHANNELS), torch.inf, requires_grad=True)
        y = mixer(x, key_mask=torch.zeros(1, 7, dtype=torch.bool))
        close(y, mixer.proj.bias.expand_as(y))
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert (gradient == 0).all(), 'hidden tokens get a gradient'

    @_every('causal')
    def test_bfloat16_and_autocast_are_close_to_float32(self, causal: bool) -> None:
        grid = self.grid[2]
        mixer, x = self.build(grid, causal=causal), tokens(grid)
        expected = mixer(x)
        with torch.autocast('cpu', torch.bfloat16):
            mixed = mixer(x)
            stepped = mixed[:, 0]
            if causal and mixer.has_steps:
                stepped, _ = mixer.step(x[:, 0], mixer.init_state(BATCH))
        assert mixed.dtype == stepped.dtype == torch.bfloat16
        atol = float(mixed.detach().abs().max()) * 2**-8 if self.steps_round else 1e-5
        close(stepped, mixed[:, 0], rtol=0.016, atol=atol)
        low = mixer.bfloat16()(x.bfloat16())
        assert low.dtype == torch.bfloat16
        for y in (mixed, low):
            error = (y.float() - expected).norm() / expected.norm()
            assert error < 0.05, f'{y.dtype} differs by {error:.1%}'

    def test_keys_and_values_come_from_the_memory(self) -> None:
        torch.manual_seed(0)
        mixer, x = self.build(), tokens((7,))
        close(mixer(x, memory=x), mixer(x))
        memory = torch.randn(BATCH, 4, CHANNELS)
        mask = torch.tensor([[True] * 4, [True, True, False, False]])
        y = mixer(x, memory=memory.masked_fill(~mask[..., None], torch.nan), key_mask=mask)
        close(y[:1], mixer(x[:1], memory=memory[:1]))
        close(y[1:], mixer(x[1:], memory=memory[1:, :2]))
        assert (y[0] - mixer(x[:1], memory=memory[1:])[0]).abs().max() > 1e-3
        projected = mixer.project_memory(memory, mask)
        close(mixer(x, memory=projected), y)
        with _refuses(ValueError, 'key_mask must be None for a projected memory'):
            mixer(x, memory=projected, key_mask=mask)

    def test_prefix_tokens_precede_the_grid(self) -> None:
        torch.manual_seed(0)
        mixer = self.build((3, 5), num_prefix_tokens=1)
        x = torch.randn(BATCH, 16, CHANNELS)
        assert mixer(x).shape == x.shape
        assert mixer(torch.randn(BATCH, 25, CHANNELS), grid=(4, 6)).shape == (BATCH, 25, CHANNELS)
        message = r'grid must hold 15 tokens with 1 prefix tokens, got \(3, 5\)'
        with _refuses(ValueError, message):
            mixer(x[:, 1:])
