"""Sampling from an autoregressive model at the cost of one step per token."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.logging import print_log
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from aft_mm.checks import check_flag, check_int, refuse

from .heads import check_sampling
from .step_graph import CompiledSteps, laid_out_for_steps, make_steps

__all__ = ['generate']

Tokens = Tensor | Sequence[Tensor] | Sequence[Sequence]


def generate(
    model: nn.Module,
    length: int,
    prompts: Tokens | None = None,
    batch_size: int | None = None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    seed: int | None = None,
    use_state: bool = True,
    progress: bool = False,
    source: Tokens | None = None,
    compiled: bool = False,
) -> Tensor:
    """Sequences of T = `length` tokens that start with their prompts, int64 [B, T] or [B, T, C].

    The prompts, of different lengths too, go through the model in one parallel pass; every token
    after them is one step that carries the state, on a CUDA device a graph of it. The model runs in
    evaluation mode and is handed back with every part of it in the mode it was in.

    Args:
        model: an :class:`AutoregressiveModel`.
        length: tokens per sequence, the prompt's included.
        prompts: one sequence of tokens [L] or [L, C] per sample, tensors or lists, or a batch of
            them, [B, L] or [B, L, C]; None starts from nothing.
        batch_size: number of samples where no prompt or source tells it; 1 unless given.
        temperature, top_k, top_p, greedy: see :func:`draw`.
        seed: 0 to 2^63 − 1; the same gives the same tokens on one device, with and without the
            state; None takes one from torch's generator.
        use_state: False computes everything anew for every token, to check the steps.
        progress: show a progress bar on stderr.
        source: one source sequence per sample for the model's encoder.
        compiled: on a CPU, take the steps by torch.compile. The first call compiles, seconds to
            minutes, a later one of as many sequences does not. Equal to plain steps to rounding,
            which now and then draws another token. Without meaning on another device, without the
            state, and with one that grows, as softmax attention's.

    Raises ValueError for a length outside 1 … the position table, a prompt that is empty, that
    leaves nothing to generate or that does not suit the head, a token outside the vocabulary, an
    option out of range (:func:`draw`), and where the numbers of samples differ.
    """
    check_sampling(temperature, top_k, top_p, seed)
    flags = dict(greedy=greedy, use_state=use_state, progress=progress, compiled=compiled)
    for name, flag in flags.items():
        check_flag(name, flag)
    check_int('length', length, 1)
    if batch_size is not None:
        check_int('batch_size', batch_size, 1)
    model.decoder.check_length(length)
    batch_size = _batch_size(prompts, source, batch_size)
    device = next(model.parameters()).device
    tokens, lengths = _start(prompts, batch_size, length, model.head.token_shape)
    options = dict(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        greedy=greedy,
        generator=torch.Generator(device).manual_seed(_new_seed() if seed is None else seed),
    )
    columns = compiled and device.type == 'cpu'
    # Laid out and returned are tensors that autograd takes, whatever mode the caller is in.
    with torch.inference_mode(False), torch.no_grad(), _evaluating(model):
        with laid_out_for_steps(model.decoder, columns), torch.inference_mode():
            memory = model.encode([None] * batch_size if source is None else list(source))
            inputs = (model, tokens.to(device), lengths.to(device), memory)
            extended = _extend(*inputs, options, use_state, progress, compiled)
        return extended.clone()


def _extend(
    model: nn.Module,
    tokens: Tensor,
    lengths: Tensor,
    memory: tuple[Tensor | None, Tensor | None],
    options: dict[str, Any],
    use_state: bool,
    progress: bool,
    compiled: bool,
) -> Tensor:
    """Fill tokens [B, T] or [B, T, C] in place from lengths [B] on."""
    decoder, row = model.decoder, torch.arange(len(tokens), device=tokens.device)
    longest, last = int(lengths.max()), tokens.shape[1] - 1
    steps = last + 1 - int(lengths.min())

    def hold_and_step(token: Tensor, state: Any) -> tuple[Tensor, Any]:
        state.hold(last - 1)
        return decoder.step(token, state)

    if use_state:
        hidden, state = decoder.prefill(tokens[:, :longest], lengths, *memory)
        # Of prompts of one length none is complete before the others.
        step = decoder.step if longest == int(lengths.min()) else hold_and_step
        advance = make_steps(step, tokens[:, 0], hidden, state, steps - 1, compiled)
        if isinstance(advance, CompiledSteps):
            print_log(f'compiled the step in {advance.seconds:.1f} s', 'current')
    bar = dict(console=Console(stderr=True), disable=not progress)
    for i in track(range(steps), 'tokens', **bar):
        # A sequence with a longer prompt is complete earlier and waits at its last token.
        position = (lengths + i).clamp_max(last)
        if not use_state:
            hidden = decoder(tokens[:, : longest + i + 1], *memory)[row, position]
        drawn = model.head.sample(hidden, **options)
        complete = (lengths + i > last).view(-1, *[1] * (tokens.dim() - 2))
        tokens[row, position] = torch.where(complete, tokens[row, position], drawn)
        if use_state and i + 1 < steps:
            hidden = advance(tokens[row, position])
    return tokens


def _start(
    prompts: Tokens | None, batch_size: int, length: int, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Tokens [B, length, *shape] with the prompts in front, and the lengths of these, [B]."""
    tokens = torch.zeros(batch_size, length, *shape, dtype=torch.long)
    lengths = torch.zeros(batch_size, dtype=torch.long)
    for i, prompt in enumerate([] if prompts is None else prompts):
        prompt = _check_prompt(prompt, i, length, shape)
        tokens[i, : len(prompt)] = prompt
        lengths[i] = len(prompt)
    return tokens, lengths


def _new_seed() -> int:
    return int(torch.randint(2**62, ()))


def _batch_size(prompts: Tokens | None, source: Tokens | None, batch_size: int | None) -> int:
    for name, given in [('prompts', prompts), ('source', source)]:
        if given is not None and (
            not isinstance(given, (Tensor, Sequence)) or isinstance(given, (str, bytes))
        ):
            refuse(name, 'a sequence of token sequences', given)
    counts = dict(
        prompts=None if prompts is None else len(prompts),
        source=None if source is None else len(source),
        batch_size=batch_size,
    )
    given = {name: number for name, number in counts.items() if number is not None}
    if len(set(given.values())) > 1 or any(number < 1 for number in given.values()):
        raise ValueError(f'prompts, source and batch_size must agree and be 1 or more, got {given}')
    return next(iter(given.values()), 1)


def _check_prompt(
    prompt: Tensor | Sequence, index: int, length: int, shape: tuple[int, ...]
) -> Tensor:
    """The prompt as [L, *shape]; an axis of one channel is left out."""
    name = f'prompts[{index}]'
    wanted = f'integers [{", ".join(["L", *map(str, shape)])}]'
    try:
        prompt = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):
        refuse(name, wanted, prompt)
    if not prompt.numel():  # An empty list has no type of its own.
        prompt = prompt.long()
    if prompt.dim() == 2 and not shape and prompt.shape[1] == 1:
        prompt = prompt.squeeze(1)
    if prompt.is_floating_point() or prompt.dim() == 0 or prompt.shape[1:] != shape:
        refuse(name, wanted, prompt)
    if not 0 < len(prompt) < length:
        raise ValueError(
            f'{name} must have 1 to {length - 1} tokens for length={length}, got {len(prompt)}'
        )
    return prompt


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode: dropout in a step would be noise in every state after it."""
    # Each part has a mode of its own: a frozen one stays in evaluation mode.
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
