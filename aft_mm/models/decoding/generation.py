"""Decoding of an autoregressive model at the cost of one step per token: samples and beams."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from mmengine.logging import print_log
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from aft_mm.checks import check_flag, check_int, check_number, refuse

from .sampling import check_logits, check_sampling
from .step_graph import CompiledSteps, laid_out_for_steps, make_steps

__all__ = ['Hypothesis', 'beam_search', 'default_length', 'generate']

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
    end_token: int | None = None,
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
        end_token: ends a sequence, whose rest is filled with it; once all have ended nothing more
            is drawn. A look at that waits for the device at every token.
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
    if end_token is not None:
        _check_end(end_token, model)
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
            tokens, lengths = tokens.to(device), lengths.to(device)
            inputs = (model, tokens, lengths, memory, options)
            _extend(*inputs, use_state, progress, end_token, compiled)
            if end_token is not None:
                drawn = torch.arange(length, device=device) >= lengths[:, None]
                tokens[((tokens == end_token) & drawn).cumsum(1) > 0] = end_token
        return tokens.clone()


def _extend(
    model: nn.Module,
    tokens: Tensor,
    lengths: Tensor,
    memory: tuple[Tensor | None, Tensor | None],
    options: dict[str, Any],
    use_state: bool,
    progress: bool,
    end_token: int | None,
    compiled: bool,
) -> None:
    """Fill tokens [B, T] or [B, T, C] in place from lengths [B] on, until all have ended."""
    decoder, row = model.decoder, torch.arange(len(tokens), device=tokens.device)
    longest, last = int(lengths.max()), tokens.shape[1] - 1
    steps = last + 1 - int(lengths.min())
    ended = torch.zeros_like(row, dtype=torch.bool)

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
        if end_token is not None:
            ended |= (drawn == end_token) | complete
            if ended.all():
                break
        if use_state and i + 1 < steps:
            hidden = advance(tokens[row, position])


class Hypothesis(NamedTuple):
    """A sequence that :func:`beam_search` found: its tokens int64 [T] without the end, its score,
    and −log p of tokens and end.
    """

    tokens: Tensor
    score: float
    nats: float


@torch.no_grad()
def beam_search(
    model: nn.Module,
    source: Tokens,
    end_token: int,
    *,
    beam_size: int = 4,
    num_best: int = 1,
    length_penalty: float = 0.6,
    max_length: int | None = None,
) -> list[list[Hypothesis]]:
    """The best sequences for each source, best first, `num_best` or all that were found.

    ``score = log p(y | x) / ((5 + |y|) / 6)^α`` with α = `length_penalty`, the end being among the
    tokens of y (arXiv 1609.08144, eq. 14). At every token the K = `beam_size` most probable
    continuations are kept; one that ends leaves the others K − 1. A source is done when none is
    left, or when none that is left can still be among its best: to stop there changes no result.
    A sequence that reaches its greatest length ends there. Each source gives what it gives alone.

    Args:
        model: an :class:`AutoregressiveModel` with an encoder and a categorical head.
        source: the source sequences [S], of different lengths too.
        end_token: ends a sequence.
        beam_size: K; 1 takes the most probable token always.
        num_best: sequences per source, at most K.
        length_penalty: α, 0 or larger; the larger, the longer the sequences.
        max_length: tokens of a sequence at most, its end included, and in any case no more than
            the position table has; :func:`default_length` of the source unless given.

    Raises ValueError for an option out of range, for a model with another head or without encoder,
    and for logits that are not finite.
    """
    check_int('beam_size', beam_size, 1)
    check_int('num_best', num_best, 1, beam_size)
    check_number('length_penalty', length_penalty, 0)
    _check_end(end_token, model)
    if max_length is not None:
        check_int('max_length', max_length, 1)
    _batch_size(None, source, None)
    with _evaluating(model):
        memory = model.encode(list(source))
        limits = [default_length(model, len(one)) for one in source]
        if max_length is not None:
            limits = [min(max_length, int(model.decoder.max_length))] * len(source)
        found = _search(model, memory, limits, end_token, beam_size, num_best, length_penalty)
    return [sorted(one, key=lambda h: -h.score)[:num_best] for one in found]


def default_length(model: nn.Module, source_length: int) -> int:
    """How long a translation may become, ``2·S + 10``, in the position table of the decoder."""
    return min(2 * source_length + 10, int(model.decoder.max_length))


def _search(
    model: nn.Module,
    memory: tuple[Tensor, Tensor],
    limits: list[int],
    end: int,
    width: int,
    num_best: int,
    alpha: float,
) -> list[list[Hypothesis]]:
    """What ended of the beams of every source."""
    device = memory[0].device
    found: list[list[Hypothesis]] = [[] for _ in limits]
    going = list(range(len(limits)))  # the sources that are not done
    none = torch.zeros(len(going), 0, dtype=torch.long, device=device)
    hidden, state = model.decoder.prefill(none, none.new_zeros(len(going)), *memory)
    rows = torch.arange(len(going), device=device).repeat_interleave(width)
    hidden, state = hidden[rows], model.decoder.select_state(state, rows)
    tokens = none.unsqueeze(1).expand(-1, width, -1)
    log_p = hidden.new_full((len(going), width), -torch.inf)
    log_p[:, 0] = 0  # all beams are the same, yet
    for length in range(1, max(limits) + 1):
        must_end = torch.tensor([limits[i] == length for i in going], device=device)
        log_p, beam, token = _extended(model.head.logits(hidden), log_p, must_end, end)
        room = torch.tensor([width - len(found[i]) for i in going], device=device)
        log_p = log_p.masked_fill(torch.arange(width, device=device) >= room[:, None], -torch.inf)
        tokens = tokens.gather(1, beam.unsqueeze(-1).expand(-1, -1, length - 1))
        ends = (token == end) & log_p.isfinite()
        for i, k in ends.nonzero().tolist():
            total = log_p[i, k].item()
            found[going[i]].append(
                Hypothesis(tokens[i, k].clone(), total / _penalty(length, alpha), -total)
            )
        tokens = torch.cat([tokens, token.unsqueeze(-1)], -1)
        log_p = log_p.masked_fill(ends, -torch.inf)
        # Of what is left none gets a better score than the best one as long as it may become.
        hope = [
            best / _penalty(limits[i], alpha)
            for i, best in zip(going, log_p.amax(1).tolist(), strict=True)
        ]
        left = [n for n, i in enumerate(going) if hope[n] > _worst(found[i], num_best)]
        if not left:
            break
        kept = torch.tensor(left, device=device)
        rows = (kept[:, None] * width + beam[kept]).flatten()
        state = model.decoder.select_state(state, rows, same_memory=len(left) == len(going))
        hidden, state = model.decoder.step(token[kept].flatten(), state)
        going, tokens, log_p = [going[n] for n in left], tokens[kept], log_p[kept]
    return found


def _extended(
    logits: Tensor, log_p: Tensor, must_end: Tensor, end: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best beams of one more token: log-probability, the beam before and the token, [B, width].

    logits: [B · width, V] of the beams. log_p: of the beams, [B, width]. must_end: [B], whose next
    token is the end.
    """
    check_logits(logits)
    step = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    step = step.unflatten(0, log_p.shape)
    others = torch.arange(step.shape[-1], device=step.device) != end
    step = step.masked_fill(must_end[:, None, None] & others, -torch.inf)
    log_p, index = (log_p.unsqueeze(-1) + step).flatten(1).topk(log_p.shape[1])
    return log_p, index // step.shape[-1], index % step.shape[-1]


def _penalty(length: int, alpha: float) -> float:
    return ((5 + length) / 6) ** alpha


def _worst(found: list[Hypothesis], num_best: int) -> float:
    """The score that a further hypothesis has to exceed to be among the `num_best`."""
    scores = sorted((h.score for h in found), reverse=True)
    return scores[num_best - 1] if len(scores) >= num_best else -float('inf')


def _check_end(end_token: int, model: nn.Module) -> None:
    if model.head.token_shape or not hasattr(model.head, 'logits'):
        raise ValueError(f'end_token needs a CategoricalHead, got {type(model.head).__name__}')
    check_int('end_token', end_token, 0, model.head.num_values - 1)


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
