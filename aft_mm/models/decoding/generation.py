from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aft_mm.checks import check_flag, check_int, check_number, refuse
from aft_mm.openmmlab import print_log

from .step_graph import CompiledSteps, make_steps, step_layout


def check_sampling(
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    greedy: bool = False,
) -> None:
    """Check the options of :func:`sample_categorical`, and a seed of at most 63 bits."""
    check_number('temperature', temperature, above=0)
    if top_k is not None:
        check_int('top_k', top_k, 1)
    if top_p is not None:
        check_number('top_p', top_p, above=0, most=1)
    check_flag('greedy', greedy)
    for name, given in dict(temperature=temperature != 1, top_k=top_k, top_p=top_p).items():
        if greedy and given:
            raise ValueError(f'{name} has no effect with greedy=True')
    if seed is not None:
        check_int('seed', seed, 0, 2**63 - 1)


def check_logits(logits: Tensor) -> None:
    """Raise ValueError if a row of logits [B, V] has NaN or no finite value; synchronises."""
    if not logits.amax(-1).isfinite().all():
        raise ValueError(
            'logits must be finite, got NaN or infinity: the weights of the model are damaged or '
            'too large'
        )


def sample_categorical(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sample one value per row of ``softmax(logits / temperature)``, int64 [B].

    Args:
        logits: [B, V].
        temperature, top_k, top_p, greedy: See :func:`aft_mm.models.generate`.
        generator: torch's default generator if None.

    Raises:
        ValueError: As :func:`check_sampling`; on a CPU also if a row has NaN or no finite logit.
    """
    check_sampling(temperature, top_k, top_p, greedy=greedy)
    if logits.device.type == 'cpu':
        check_logits(logits)
    if greedy:
        return logits.argmax(-1)
    p = (logits.double() / temperature).softmax(-1)
    if top_k is not None or top_p is not None:
        p = p * _most_probable(p, top_k, top_p)
    # Unsorted, so that noise belongs to a value and not to its rank.
    return torch.multinomial(p, 1, generator=generator).squeeze(-1)


def _most_probable(p: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Return which values `top_k` and then `top_p` allow, bool [B, V]."""
    p, values = p.sort(stable=True, dim=-1, descending=True)
    allowed = torch.ones_like(p, dtype=torch.bool)
    if top_k is not None:
        allowed[:, top_k:] = False
        p = p * allowed
        p = p / p.sum(-1, keepdim=True)
    if top_p is not None:
        allowed &= p.cumsum(-1) - p < top_p
    return allowed.scatter(-1, values, allowed)


Tokens = Tensor | Sequence[Tensor] | Sequence[Sequence[Any]]


def generate(
    model: Any,
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
    """Sample sequences that continue the prompts.

    Args:
        length: Tokens T per sequence, including the prompt.
        prompts: Sequences [L] or [L, C], a batch [B, L] or [B, L, C], or None.
        batch_size: Number of samples B without prompts and source; 1 by default.
        temperature: Divides the logits, above 0.
        top_k: Only sample among the k most probable values.
        top_p: After `top_k`, only among the fewest values with this total probability.
        greedy: Take the most probable value instead of sampling.
        seed: 0 to 2^63 − 1; None takes one from torch's generator.
        use_state: False runs the whole decoder for every token.
        progress: Show a progress bar on stderr.
        source: One source sequence per sample.
        end_token: Ends a sequence and fills its rest.
        compiled: Compile the steps on a CPU, in up to minutes, unless the state grows, as that of
            softmax attention does. Rounding may change a token.

    Returns:
        Sequences int64 [B, T] or [B, T, C], prompts included.
    """
    check_sampling(temperature, top_k, top_p, seed, greedy)
    flags = dict(use_state=use_state, progress=progress, compiled=compiled)
    for name, flag in flags.items():
        check_flag(name, flag)
    check_int('length', length, 1)
    if batch_size is not None:
        check_int('batch_size', batch_size, 1)
    if end_token is not None:
        _check_end(end_token, model)
    head = model.head
    decoder = model.decoder
    decoder.check_length(length)
    batch_size = _batch_size(prompts, source, batch_size)
    device = next(model.parameters()).device
    tokens, lengths = _start(prompts, batch_size, length, head.token_shape)
    seed = int(torch.randint(2**62, ())) if seed is None else seed
    options = dict(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        greedy=greedy,
        generator=torch.Generator(device).manual_seed(seed),
    )
    columns = compiled and device.type == 'cpu'
    # Results must be normal tensors, also in inference mode.
    with torch.inference_mode(False), torch.no_grad(), evaluating(model):
        with step_layout(decoder, columns), torch.inference_mode():
            memory = model.encode([None] * batch_size if source is None else _sources(source))
            tokens, lengths = tokens.to(device), lengths.to(device)
            inputs = (model, tokens, lengths, memory, options)
            _extend(*inputs, use_state, progress, end_token, compiled)
            if end_token is not None:
                sampled = torch.arange(length, device=device) >= lengths[:, None]
                tokens[((tokens == end_token) & sampled).cumsum(1) > 0] = end_token
        return tokens.clone()


def _extend(
    model: Any,
    tokens: Tensor,
    lengths: Tensor,
    memory: tuple[Tensor | None, Tensor | None],
    options: dict[str, Any],
    use_state: bool,
    progress: bool,
    end_token: int | None,
    compiled: bool,
) -> None:
    """Fill tokens [B, T] or [B, T, C] in place from lengths [B] on."""
    decoder = model.decoder
    row = torch.arange(len(tokens), device=tokens.device)
    longest, last = int(lengths.max()), tokens.shape[1] - 1
    steps = last + 1 - int(lengths.min())
    ended = torch.zeros_like(row, dtype=torch.bool)

    def hold_and_step(token: Tensor, state: Any) -> tuple[Tensor, Any]:
        state.hold(last - 1)
        result: tuple[Tensor, Any] = decoder.step(token, state)
        return result

    if use_state:
        hidden, state = decoder.prefill(tokens[:, :longest], lengths, *memory)
        # Prompts of one length end at the same time.
        step = decoder.step if longest == int(lengths.min()) else hold_and_step
        advance = make_steps(step, tokens[:, 0], hidden, state, steps - 1, compiled)
        if isinstance(advance, CompiledSteps):
            print_log(f'compiled the step in {advance.seconds:.1f} s', 'current')
    for i in _tracked(steps) if progress else range(steps):
        # A sequence with a longer prompt stays at its last token.
        position = (lengths + i).clamp_max(last)
        if not use_state:
            hidden = decoder(tokens[:, : longest + i + 1], *memory)[row, position]
        sampled = model.head.sample(hidden, **options)
        complete = (lengths + i > last).view(-1, *[1] * (tokens.dim() - 2))
        tokens[row, position] = torch.where(complete, tokens[row, position], sampled)
        if end_token is not None:
            ended |= (sampled == end_token) | complete
            if ended.all():
                break
        if use_state and i + 1 < steps:
            hidden = advance(tokens[row, position])


def _tracked(steps: int) -> Iterable[int]:
    from rich.console import Console
    from rich.progress import track

    return track(range(steps), 'tokens', console=Console(stderr=True))


class Hypothesis(NamedTuple):
    """A result of :func:`beam_search`.

    tokens: int64 [T], without the end. nats: −log p of the tokens and the end.
    """

    tokens: Tensor
    score: float
    nats: float


@torch.no_grad()
def beam_search(
    model: Any,
    source: Tokens,
    end_token: int,
    *,
    beam_size: int = 4,
    num_best: int = 1,
    length_penalty: float = 0.6,
    max_length: int | None = None,
) -> list[list[Hypothesis]]:
    """Search the sequences with the best scores for each source.

    ``score = log p(y | x) / ((5 + |y|) / 6)^α`` with α = `length_penalty`, counting the end (arXiv
    1609.08144, eq. 14). At every token the K = `beam_size` most probable continuations are kept;
    each one that ends reduces K by one.

    Args:
        model: An :class:`AutoregressiveModel` with an encoder and a categorical head.
        source: Source sequences [S], also of different lengths.
        end_token: Ends a sequence.
        beam_size: K; 1 always takes the most probable token.
        num_best: Results per source, at most K.
        length_penalty: α, 0 to 10; larger favours longer sequences.
        max_length: Tokens with the end at most, by default :func:`default_length`.

    Returns:
        For each source up to `num_best` results, best first.

    Raises:
        ValueError: An option is out of range, the model does not fit, or logits are not finite.
    """
    check_int('beam_size', beam_size, 1)
    check_int('num_best', num_best, 1, beam_size)
    check_number('length_penalty', length_penalty, 0, 10)  # larger powers overflow
    _check_end(end_token, model)
    if max_length is not None:
        check_int('max_length', max_length, 1)
    _batch_size(None, source, None)
    with evaluating(model):
        memory = model.encode(_sources(source))
        limits = [default_length(model, len(one)) for one in source]
        if max_length is not None:
            limits = [min(max_length, model.decoder.max_length)] * len(source)
        finished = _search(model, memory, limits, end_token, beam_size, num_best, length_penalty)
    return [sorted(one, key=lambda h: -h.score)[:num_best] for one in finished]


def default_length(model: Any, source_length: int) -> int:
    """Return the largest length of a translation, ``2·S + 10``, within the position table."""
    return min(2 * source_length + 10, int(model.decoder.max_length))


def _search(
    model: Any,
    memory: tuple[Tensor, Tensor],
    limits: list[int],
    end: int,
    width: int,
    num_best: int,
    alpha: float,
) -> list[list[Hypothesis]]:
    device = memory[0].device
    finished: list[list[Hypothesis]] = [[] for _ in limits]
    going = list(range(len(limits)))  # not done
    none = torch.zeros(len(going), 0, dtype=torch.long, device=device)
    hidden, state = model.decoder.prefill(none, none.new_zeros(len(going)), *memory)
    rows = torch.arange(len(going), device=device).repeat_interleave(width)
    hidden, state = hidden[rows], model.decoder.select_state(state, rows)
    tokens = none.unsqueeze(1).expand(-1, width, -1)
    log_p = hidden.new_full((len(going), width), -torch.inf)
    log_p[:, 0] = 0  # all beams start equal, so only one is extended
    for length in range(1, max(limits) + 1):
        must_end = torch.tensor([limits[i] == length for i in going], device=device)
        log_p, beam, token = _extended(model.head.logits(hidden), log_p, must_end, end)
        room = torch.tensor([width - len(finished[i]) for i in going], device=device)
        log_p = log_p.masked_fill(torch.arange(width, device=device) >= room[:, None], -torch.inf)
        tokens = tokens.gather(1, beam.unsqueeze(-1).expand(-1, -1, length - 1))
        ends = (token == end) & log_p.isfinite()
        for i, k in ends.nonzero().tolist():
            total = log_p[i, k].item()
            finished[going[i]].append(
                Hypothesis(tokens[i, k].clone(), total / _penalty(length, alpha), -total)
            )
        tokens = torch.cat([tokens, token.unsqueeze(-1)], -1)
        log_p = log_p.masked_fill(ends, -torch.inf)
        # An upper bound of later scores.
        hope = [
            best / _penalty(limits[i], alpha)
            for i, best in zip(going, log_p.amax(1).tolist(), strict=True)
        ]
        left = [n for n, i in enumerate(going) if hope[n] > _worst(finished[i], num_best)]
        if not left:
            break
        index = torch.tensor(left, device=device)
        rows = (index[:, None] * width + beam[index]).flatten()
        state = model.decoder.select_state(state, rows, same_memory=len(left) == len(going))
        hidden, state = model.decoder.step(token[index].flatten(), state)
        going, tokens, log_p = [going[n] for n in left], tokens[index], log_p[index]
    return finished


def _extended(
    logits: Tensor, log_p: Tensor, must_end: Tensor, end: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log probability, previous beam and token [B, width] of the longer beams."""
    check_logits(logits)
    step = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    step = step.unflatten(0, log_p.shape)
    others = torch.arange(step.shape[-1], device=step.device) != end
    step = step.masked_fill(must_end[:, None, None] & others, -torch.inf)
    log_p, index = (log_p.unsqueeze(-1) + step).flatten(1).topk(log_p.shape[1])
    return log_p, index // step.shape[-1], index % step.shape[-1]


def _penalty(length: int, alpha: float) -> float:
    return float(((5 + length) / 6) ** alpha)


def _worst(finished: list[Hypothesis], num_best: int) -> float:
    scores = sorted((h.score for h in finished), reverse=True)
    return scores[num_best - 1] if len(scores) >= num_best else -float('inf')


def _check_end(end_token: int, model: Any) -> None:
    head = model.head
    if head.token_shape or not hasattr(head, 'logits'):
        raise ValueError(
            f'head must be a CategoricalHead for an end_token, got {type(head).__name__}'
        )
    check_int('end_token', end_token, 0, head.num_values - 1)


def _start(
    prompts: Tokens | None, batch_size: int, length: int, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return tokens [B, length, *shape] that start with the prompts, and their lengths [B]."""
    tokens = torch.zeros(batch_size, length, *shape, dtype=torch.long)
    lengths = torch.zeros(batch_size, dtype=torch.long)
    for i, prompt in enumerate([] if prompts is None else prompts):
        prompt = _check_prompt(prompt, i, length, shape)
        tokens[i, : len(prompt)] = prompt
        lengths[i] = len(prompt)
    return tokens, lengths


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
    known = {name: number for name, number in counts.items() if number is not None}
    if len(set(known.values())) > 1 or any(number < 1 for number in known.values()):
        raise ValueError(f'prompts, source and batch_size must agree and be 1 or more, got {known}')
    return next(iter(known.values()), 1)


def _check_prompt(
    prompt: Tensor | Sequence[Any], index: int, length: int, shape: tuple[int, ...]
) -> Tensor:
    name = f'prompts[{index}]'
    wanted = f'integers [{", ".join(["L", *map(str, shape)])}]'
    prompt = as_tensor(prompt, name, wanted)
    if not prompt.numel():  # torch makes an empty list a float tensor
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


def as_tensor(given: Any, name: str, wanted: str) -> Tensor:
    if hasattr(given, '__array_interface__'):
        given = given.copy()  # torch takes no negative strides
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        refuse(name, wanted, given)


def _sources(source: Tokens) -> list[Tensor]:
    """Return the sources as tensors of integers [S] or [S, C]."""
    checked = []
    for index, one in enumerate(source):
        name, wanted = f'source[{index}]', 'integers [S] or [S, C], S of 1 or more'
        tokens = as_tensor(one, name, wanted)
        if tokens.is_floating_point() or not tokens.dim() or not tokens.numel():
            refuse(name, wanted, one)
        checked.append(tokens)
    return checked


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Set a model to evaluation mode inside the block; other threads must not use it meanwhile.

    A model in evaluation mode stays as it is, and may be shared.
    """
    # Frozen modules are in evaluation mode while training.
    trained = [module for module in model.modules() if module.training]
    if trained:
        model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True
