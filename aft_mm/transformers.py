"""Image and language models with AFT for Transformers; importing this module registers them.

``load_state_dict`` takes checkpoints of mmpretrain's ImageClassifier with :class:`AFTViT` and of
:class:`AutoregressiveModel`.
"""

import copy
import inspect
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm.checks import check_int, refuse
from aft_mm.errors import SIMILARITY, missing_package
from aft_mm.layers import Block
from aft_mm.models import AFTViT, AutoregressiveModel, CategoricalHead

try:
    from transformers import (
        AutoBackbone,
        AutoConfig,
        AutoImageProcessor,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageClassification,
        Cache,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
    )
    from transformers import initialization as init
    from transformers.backbone_utils import BackboneConfigMixin, BackboneMixin
    from transformers.image_processing_backends import PilBackend
    from transformers.image_utils import (
        IMAGENET_DEFAULT_MEAN,
        IMAGENET_DEFAULT_STD,
        PILImageResampling,
    )
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_outputs import (
        BackboneOutput,
        BaseModelOutputWithPooling,
        CausalLMOutputWithPast,
        ImageClassifierOutput,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils import can_return_tuple
except ImportError as error:
    raise missing_package(error, 'aft_mm.transformers', 'transformers') from None

__all__ = [
    'AFTBackbone',
    'AFTCache',
    'AFTConfig',
    'AFTForCausalLM',
    'AFTForImageClassification',
    'AFTImageProcessor',
    'AFTModel',
    'AFTTextConfig',
]


def _check_placed(place: str, inside: Collection[str], kwargs: dict[str, Any]) -> None:
    """Refuse entries of `place` beside it, and a misspelt `place`, which Transformers would keep."""
    for name in kwargs:
        if name in inside:
            raise TypeError(f'{name} must be given as {place}=dict({name}=…)')
        if get_close_matches(name, [place], cutoff=SIMILARITY):
            raise TypeError(f'{name!r} is no argument; did you mean {place!r}?')


class AFTConfig(BackboneConfigMixin, PreTrainedConfig):
    """Config of the image models.

    Args:
        backbone: arguments of :class:`AFTViT`.
        out_features: stages that :class:`AFTBackbone` returns, among 'stem' (the embedded patches),
            'stage1', …; the last one by default.
        out_indices: their indices, instead of `out_features`.
        **kwargs: see Transformers' PreTrainedConfig, such as num_labels.
    """

    model_type = 'aft'

    def __init__(
        self,
        backbone: dict[str, Any] | None = None,
        out_features: list[str] | None = None,
        out_indices: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        _check_placed('backbone', inspect.signature(AFTViT).parameters, kwargs)
        self.backbone = {} if backbone is None else copy.deepcopy(dict(backbone))
        super().__init__(**kwargs)
        arch = AFTViT.parse_arch(self.backbone.get('arch', 'tiny'))
        self.hidden_size, self.num_hidden_layers, _ = arch
        self.stage_names = ['stem', *(f'stage{i + 1}' for i in range(self.num_hidden_layers))]
        self.set_output_features_output_indices(out_features, out_indices)


class AFTTextConfig(PreTrainedConfig):
    """Config of the language model.

    Args:
        model: ``dict(decoder=…, head=…)``, the configs of a :class:`SequenceDecoder` with a
            TokenEmbedding and of a :class:`CategoricalHead`; a small model of bytes by default.
        **kwargs: see Transformers' PreTrainedConfig, such as eos_token_id and pad_token_id.
    """

    model_type = 'aft_text'

    def __init__(self, model: dict[str, Any] | None = None, **kwargs: Any) -> None:
        _check_placed('model', ('decoder', 'head'), kwargs)
        self.model: dict[str, Any] = copy.deepcopy(_BYTES if model is None else dict(model))
        super().__init__(**kwargs)
        decoder = self.model.get('decoder')
        if not isinstance(decoder, dict) or not _NEEDED <= decoder.keys():
            refuse('model.decoder', f'a dict with {", ".join(sorted(_NEEDED))}', decoder)
        self.hidden_size, self.num_hidden_layers = decoder['embed_dims'], decoder['num_layers']
        self.vocab_size = decoder['embedding'].get('vocab_size')


_NEEDED = frozenset({'embed_dims', 'num_layers', 'embedding'})
# Transformers makes configs without arguments.
_BYTES = dict(
    decoder=dict(
        type='aft_mm.SequenceDecoder',
        embed_dims=256,
        num_layers=6,
        embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=256),
        token_mixer=dict(type='aft_mm.AFTLocal', window=32, rank=64),
        grid=[1024],
    ),
    head=dict(type='aft_mm.CategoricalHead', embed_dims=256, num_classes=256),
)


@contextmanager
def _recorded(layers: nn.ModuleList, wanted: bool = True) -> Iterator[list[Tensor]]:
    states: list[Tensor] = []
    with ExitStack() as hooks:
        if wanted:
            first = layers[0].register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
            hooks.enter_context(first)
            for layer in layers:
                hook = layer.register_forward_hook(lambda _, inputs, x: states.append(x))
                hooks.enter_context(hook)
        yield states


#: What this version of Transformers calls the state between tokens.
CACHE_NAME = 'cache' if 'cache' in CausalLMOutputWithPast.__annotations__ else 'past_key_values'
#: Arguments that peft and other models pass to a model; they must be None or False.
ABSENT = ('inputs_embeds', 'output_attentions')


class CheckpointedBlock(GradientCheckpointingLayer, Block):
    pass


class _Model(PreTrainedModel):
    _no_split_modules = ['CheckpointedBlock']
    supports_gradient_checkpointing = True
    # The loss is a mean over the batch, also where Trainer accumulates gradients.
    accepts_loss_kwargs = False

    def post_init(self) -> None:
        for module in self.modules():
            if type(module) is Block:
                module.__class__ = CheckpointedBlock
        super().post_init()

    def _check_absent(self, absent: dict[str, Any]) -> None:
        """Refuse arguments that are unknown, or that change what another model does."""
        for name, value in absent.items():
            if name not in ABSENT:
                known = inspect.signature(self.forward).parameters
                names = ', '.join(n for n in known if n != 'absent')
                raise TypeError(f'{type(self).__name__} has no argument {name!r}, only {names}')
            if value is not None and value is not False:
                refuse(name, f'None or False for {type(self).__name__}', value)

    def _init_weights(self, module: nn.Module) -> None:
        # Transformers makes the model without data before it reads a checkpoint; what the checkpoint
        # lacks gets the values of a new model.
        direct = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        tensors = dict([*self.named_parameters(), *self.named_buffers()])
        read = {name for name, t in tensors.items() if getattr(t, '_is_hf_initialized', False)}
        if not read or all(getattr(t, '_is_hf_initialized', False) for t in direct):
            return
        with torch.device('cpu'):
            fresh = type(self)(self.config)
        values = dict([*fresh.named_parameters(), *fresh.named_buffers()])
        for name in tensors.keys() - read:
            init.copy_(tensors[name], values[name])
            tensors[name]._is_hf_initialized = True


class _ImageModel(_Model):
    config_class = AFTConfig
    main_input_name = 'pixel_values'

    def __init__(self, config: AFTConfig) -> None:
        super().__init__(config)
        self.backbone = AFTViT(**config.backbone)

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.patch_embed.projection

    def _tokens(self, pixel_values: Tensor, hidden: bool | None) -> tuple[Tensor, tuple | None]:
        wanted = self.config.output_hidden_states if hidden is None else hidden
        with _recorded(self.backbone.layers, wanted) as states:
            tokens = self.backbone.forward_intermediates(pixel_values, indices=1)[0]
        return tokens, tuple(states) if wanted else None

    def _pool(self, tokens: Tensor) -> Tensor:
        if self.backbone.out_type == 'cls_token':
            return tokens[:, 0]
        tokens = tokens[:, self.backbone.num_prefix_tokens :]
        return tokens.mean(1) if self.backbone.pooling is None else self.backbone.pooling(tokens)


class AFTImageProcessor(PilBackend):
    """Images as the configs of ImageNet are tested: shorter edge 256, the centre of 224 × 224.

    Other sizes are arguments, such as ``size=dict(shortest_edge=73), crop_size=dict(height=64,
    width=64)``; see Transformers' ImagesKwargs.
    """

    resample = PILImageResampling.BICUBIC
    image_mean, image_std = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    size, default_to_square = dict(shortest_edge=256), False
    crop_size = dict(height=224, width=224)
    do_resize = do_center_crop = do_rescale = do_normalize = do_convert_rgb = True


class AFTModel(_ImageModel):
    """Image model without a head, see :class:`AFTConfig`."""

    _keys_to_ignore_on_load_unexpected = [r'^head\.']

    def __init__(self, config: AFTConfig) -> None:
        super().__init__(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        **absent: Any,
    ) -> BaseModelOutputWithPooling:
        """Return the tokens [B, T, D] after the final norm, class token first, and pooled [B, D].

        Args:
            pixel_values: images [B, C, H, W].
            output_hidden_states: also return the tokens [B, T, D] that enter the first layer and leave each
                layer.
        """
        self._check_absent(absent)
        tokens, hidden = self._tokens(pixel_values, output_hidden_states)
        return BaseModelOutputWithPooling(tokens, self._pool(tokens), hidden)


class AFTForImageClassification(_ImageModel):
    """Image model with a linear classifier on the pooled tokens, see :class:`AFTConfig`."""

    def __init__(self, config: AFTConfig) -> None:
        super().__init__(config)
        classifier = nn.Linear(config.hidden_size, config.num_labels)
        nn.init.trunc_normal_(classifier.weight, std=0.02)
        nn.init.zeros_(classifier.bias)
        self.head = nn.ModuleDict(dict(fc=classifier))
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **absent: Any,
    ) -> ImageClassifierOutput:
        """Return logits [B, num_labels], and the loss if labels are given.

        Args:
            labels: class of each image [B], or floats [B, num_labels], as problem_type of the
                config says.
        """
        self._check_absent(absent)
        tokens, hidden = self._tokens(pixel_values, output_hidden_states)
        logits = self.head['fc'](self._pool(tokens))
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return ImageClassifierOutput(loss, logits, hidden)


class AFTBackbone(BackboneMixin, _ImageModel):
    """Feature maps for detectors and segmentors of Transformers, see :class:`AFTConfig`."""

    has_attentions = False
    _keys_to_ignore_on_load_unexpected = [r'^head\.']

    def __init__(self, config: AFTConfig) -> None:
        super().__init__(config)
        self.num_features = [config.hidden_size] * len(config.stage_names)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        **absent: Any,
    ) -> BackboneOutput:
        """Return one map [B, D, H', W'] per stage of out_features, the last stage normalised.

        Args:
            pixel_values: images [B, C, H, W].
            output_hidden_states: also return the maps of all stages, not normalised.
        """
        self._check_absent(absent)
        wanted = sorted(i % len(self.stage_names) for i in self.out_indices)
        every = output_hidden_states
        if every is None:
            every = self.config.output_hidden_states
        count = len(self.backbone.layers)
        layers = range(count) if every else sorted({max(i - 1, 0) for i in wanted})
        with _recorded(self.backbone.layers) as states:
            intermediates = self.backbone.forward_intermediates(
                pixel_values, layers, intermediates_only=True
            )
        maps = {i + 1: m for i, m in zip(layers, intermediates, strict=True)}
        patches = states[0][:, self.backbone.num_prefix_tokens :]
        maps[0] = patches.mT.reshape(intermediates[0].shape).to(intermediates[0].dtype)
        hidden = tuple(maps[i] for i in range(count + 1)) if every else None
        if count in wanted:
            maps[count] = self.backbone.norm(maps[count].movedim(1, -1)).movedim(-1, 1)
        return BackboneOutput(tuple(maps[i] for i in wanted), hidden)


class AFTCache(Cache):
    """State of :class:`AFTForCausalLM` between tokens; only that of softmax attention grows."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        #: State of the decoder; None before the prompt.
        self.state: Any = None
        self.length = self.longest = 0  # with padding, and of the longest prompt without
        self.read: Any = None  # a hash of the tokens of each sequence [B]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens seen, padding included."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    # Of no layers Transformers takes both of these for True.
    @property
    def is_linear(self) -> list[bool]:
        return [False]

    @property
    def is_croppable(self) -> bool:
        return False

    def reset(self) -> None:
        self.state, self.length, self.longest, self.read = None, 0, 0, None

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            refuse('tokens_to_remove', '0, as a state of sums forgets no token', tokens_to_remove)

    def check_continues(self, prompt: Tensor | None, mask: Tensor | None) -> None:
        """Refuse a prompt [B, L] that neither begins with the tokens read, nor is of new ones only."""
        if prompt is not None and len(prompt) == len(self.read):
            length = prompt.shape[1]
            is_new = mask is not None and mask.shape[1] == self.length + length
            read = _hashed(prompt[:, : self.length]).to(self.read)
            if is_new or length > self.length and read.equal(self.read):
                return
        shape = [len(self.read), self.length]
        allowed = f'the {shape} tokens of the cache and more, or the attention_mask of both'
        refuse('input_ids', allowed, prompt)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError('AFTForCausalLM._reorder_cache selects sequences of an AFTCache')

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError('the sequences of an AFTCache cannot be repeated')


class AFTForCausalLM(_Model, GenerationMixin):
    """Language model whose ``generate`` carries a state of constant size.

    Its loss counts every label, also the first.

    Args:
        config: see :class:`AFTTextConfig`.
    """

    config_class = AFTTextConfig
    _is_stateful = True

    def __init__(self, config: AFTTextConfig) -> None:
        super().__init__(config)
        # Checks that decoder and head fit.
        model = AutoregressiveModel(**config.model)
        if not isinstance(model.head, CategoricalHead):
            refuse('head', 'a CategoricalHead', config.model['head'])
        self.decoder, self.head = model.decoder, model.head
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embedding

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def set_input_embeddings(self, value: nn.Module) -> None:
        embedding = self.decoder.embedding
        if value.weight.shape != embedding.weight.shape:
            allowed = (
                f'an embedding {list(embedding.weight.shape)}; resize_token_embeddings adds rows'
            )
            refuse('value', allowed, value.weight)
        embedding.weight = value.weight

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Module:
        """Change the number of token values in embedding and head, and return the embedding.

        Args:
            new_num_tokens: vocabulary V, by default the current one.
            pad_to_multiple_of: V is rounded up to a multiple of this.
            mean_resizing: New rows are the mean of the old ones, else those of a new model.
        """
        size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        check_int('new_num_tokens', size, 1)
        if pad_to_multiple_of is not None:
            check_int('pad_to_multiple_of', pad_to_multiple_of, 1)
            size += -size % pad_to_multiple_of
        kept = min(size, self.config.vocab_size)
        model = copy.deepcopy(self.config.model)
        model['decoder']['embedding']['vocab_size'] = model['head']['num_classes'] = size
        fresh = AutoregressiveModel(**model).to(self.device, self.dtype)
        self.config.model, self.config.vocab_size = model, size
        tables = zip(
            [*fresh.head.parameters(), fresh.decoder.embedding.weight],
            [*self.head.parameters(), self.decoder.embedding.weight],
            strict=True,
        )
        with torch.no_grad():
            for new, old in tables:
                new[:kept] = old[:kept]
                if mean_resizing:
                    new[kept:] = old.mean(0)
        self.decoder.embedding, self.head = fresh.decoder.embedding, fresh.head
        return self.decoder.embedding

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: AFTCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool | None = None,
        past_key_values: AFTCache | None = None,
        shift_labels: Tensor | None = None,
        **absent: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, L, V]; row t predicts token t + 1, and is 0 after the last position.

        Args:
            input_ids: tokens [B, L]. With a filled cache, only the new ones.
            attention_mask: [B, L], 0 for padding on either side; with a filled cache columns of
                earlier tokens may precede.
            cache: from a previous call; it is overwritten.
            labels: [B, L], usually `input_ids` itself, −100 for tokens without a loss. Not with a
                filled cache.
            use_cache: return a cache; by default if one is given.
            logits_to_keep: number of last rows to return, 0 for all.
            output_hidden_states: also return the vectors [B, L, D] before and after each block. Not
                with a filled cache.
            past_key_values: the name of `cache` before Transformers 5.24.
            shift_labels: [B, L], the labels of the tokens after those of `input_ids`, in place of
                `labels`.
            **absent: see :data:`ABSENT`.

        Raises:
            TypeError: an argument is unknown.
            ValueError: a sequence is too long, a token outside the vocabulary, or an argument does
                not go with a filled cache.
        """
        self._check_absent(absent)
        cache, loss = self._cache_of(cache, past_key_values), None
        use_cache = cache is not None if use_cache is None else use_cache
        states: Sequence[Tensor] | None = None
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if cache is not None and cache.state is not None:
            if output_hidden_states:
                refuse('output_hidden_states', 'False with a filled cache', True)
            for name, given in (('labels', labels), ('shift_labels', shift_labels)):
                if given is not None:
                    refuse(name, 'None with a filled cache', given)
            logits = self._continue(input_ids, attention_mask, cache)
        else:
            # Padding on the left is moved to the end: positions start at 0.
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            if mask.is_floating_point() and not torch.compiler.is_compiling():
                if not torch.isin(mask, mask.new_tensor([0, 1])).all():
                    refuse('attention_mask', '1 for tokens and 0 for padding', mask)
            given_rows = dict(attention_mask=mask, labels=labels, shift_labels=shift_labels)
            for name, given in given_rows.items():
                if given is not None and given.shape != input_ids.shape:
                    refuse(name, f'of the shape {list(input_ids.shape)} of input_ids', given)
            order = _tokens_first(mask)
            tokens, lengths = input_ids.gather(1, order), mask.bool().sum(1)
            # Of the tokens, and the next one.
            targets = None if labels is None else F.pad(labels, (0, 1), value=-100)
            if shift_labels is not None:
                targets = F.pad(shift_labels, (1, 0), value=-100)
            if use_cache and logits_to_keep == 1 and targets is None and not output_hidden_states:
                cache = AFTCache() if cache is None else cache
                hidden = self._read_prompt(input_ids, tokens, lengths, cache).unsqueeze(1)
                logits = self.head.logits(hidden)
            else:
                hidden, *states = self._hidden(tokens, output_hidden_states)
                logits = self.head.logits(hidden)
                if targets is not None:
                    # The next token follows the last one, not the padding.
                    ends = F.pad(mask.long(), (0, 1), value=int(shift_labels is not None))
                    targets = targets.gather(1, _tokens_first(ends))
                    targets, beyond = targets.tensor_split([logits.shape[1]], 1)
                    if shift_labels is not None and (beyond != -100).any():
                        allowed = '-100 for the token after the last position of the table'
                        refuse('shift_labels', allowed, shift_labels)
                    loss = F.cross_entropy(logits.float().mT, targets)
                back = order.argsort(dim=1).unsqueeze(-1)

                def rows_of(x: Tensor) -> Tensor:
                    """Return the rows after each token of the input, 0 where there is none."""
                    x = F.pad(x[:, 1:], (0, 0, 0, input_ids.shape[1] + 1 - x.shape[1]))
                    return x.gather(1, back.expand(-1, -1, x.shape[2]))

                logits = rows_of(logits)
                states = tuple(map(rows_of, states))
                if use_cache:
                    cache = AFTCache() if cache is None else cache
                    self._read_prompt(input_ids, tokens, lengths, cache)
        logits = logits[:, -logits_to_keep:] if logits_to_keep else logits
        return CausalLMOutputWithPast(loss, logits, cache if use_cache else None, states or None)

    def generate(
        self,
        *args: Any,
        cache: AFTCache | None = None,
        past_key_values: AFTCache | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate tokens as Transformers does; a cache may have either name.

        Raises:
            ValueError: The cache is filled, and the prompt does not continue its tokens.
        """
        cache = self._cache_of(cache, past_key_values)
        if cache is not None and cache.read is not None:
            prompt = args[0] if args else kwargs.get('input_ids', kwargs.get('inputs'))
            cache.check_continues(prompt, kwargs.get('attention_mask'))
        return super().generate(*args, **kwargs, **({} if cache is None else {CACHE_NAME: cache}))

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict:
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        cache = self._cache_of(inputs.get('cache'), inputs.get('past_key_values'))
        given = inputs['input_ids'].shape[1]
        if given < input_ids.shape[1] and (cache is None or cache.state is None):
            raise RuntimeError(
                f'the cache of {input_ids.shape[1] - given} tokens must be passed with the next ones; this '
                'version of Transformers lost it, use_cache=False needs none'
            )
        return {**inputs, 'logits_to_keep': 1}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _reorder_cache(self, cache: AFTCache, beam_idx: Tensor) -> AFTCache:
        cache.state = self.decoder.select_state(cache.state, beam_idx)
        cache.read = cache.read[beam_idx]
        return cache

    def _hidden(self, tokens: Tensor, with_states: bool) -> list[Tensor]:
        """Return vectors [B, L + 1, D] that predict the tokens [B, L] and the next one, if any."""
        has_next = tokens.shape[1] < self.decoder.max_length
        with _recorded(self.decoder.layers, with_states) as states:
            hidden = self.decoder(F.pad(tokens, (0, 1)) if has_next else tokens)
        if not with_states:
            return [hidden]
        return [hidden, *(x[:, : hidden.shape[1]] for x in states[:-1]), hidden]

    def _read_prompt(
        self, input_ids: Tensor, tokens: Tensor, lengths: Tensor, cache: AFTCache
    ) -> Tensor:
        longest = int(lengths.max())
        hidden, cache.state = self.decoder.prefill(tokens[:, :longest], lengths)
        cache.length, cache.longest, cache.read = tokens.shape[1], longest, _hashed(input_ids)
        return hidden

    @staticmethod
    def _cache_of(cache: Any, past_key_values: Any) -> AFTCache | None:
        if cache is not None and past_key_values is not None and cache is not past_key_values:
            refuse('past_key_values', 'None with a cache', past_key_values)
        cache = past_key_values if cache is None else cache
        if cache is not None and not isinstance(cache, AFTCache):
            refuse('cache', 'an AFTCache', cache)
        return cache

    def _continue(self, tokens: Tensor, mask: Tensor | None, cache: AFTCache) -> Tensor:
        count = tokens.shape[1]
        if mask is not None:
            if mask.shape not in {(len(tokens), count), (len(tokens), cache.length + count)}:
                allowed = f'of the shape {list(tokens.shape)} of input_ids'
                refuse('attention_mask', f'{allowed}, or of {cache.length} more tokens', mask)
            if not mask[:, mask.shape[1] - count :].all():
                refuse('attention_mask', '1 for the tokens after a filled cache', mask)
        logits = []
        for token in tokens.unbind(1):
            self.decoder.check_length(cache.longest + 2)  # on a GPU, a step does not check
            cache.longest += 1
            hidden, cache.state = self.decoder.step(token, cache.state)
            logits.append(self.head.logits(hidden))
        cache.length += tokens.shape[1]
        cache.read = _hashed(tokens, cache.read)
        return torch.stack(logits, 1)


def _hashed(tokens: Tensor, before: Tensor | int = 0) -> Tensor:
    """Return a hash [B] of tokens [B, L] that follow those of the hash `before`."""
    powers = torch.full((tokens.shape[1] + 1,), 1_000_003, device=tokens.device)
    powers[0] = 1
    powers = powers.cumprod(0).flip(0)  # int64 wraps around
    return before * powers[0] + ((tokens.long() + 1) * powers[1:]).sum(1)


def _tokens_first(mask: Tensor) -> Tensor:
    """Return the order [B, L] that moves padding to the end."""
    return mask.bool().logical_not().long().argsort(dim=1, stable=True)


AutoConfig.register('aft', AFTConfig)
AutoConfig.register('aft_text', AFTTextConfig)
# Transformers asks for 'torchvision' by default; Pillow resizes as in training.
_processors = dict(torchvision=AFTImageProcessor, pil=AFTImageProcessor)
AutoImageProcessor.register(AFTConfig, image_processor_classes=_processors)
AutoModel.register(AFTConfig, AFTModel)
AutoModelForImageClassification.register(AFTConfig, AFTForImageClassification)
AutoBackbone.register(AFTConfig, AFTBackbone)
AutoModelForCausalLM.register(AFTTextConfig, AFTForCausalLM)
# Else Trainer smooths the label of each token itself, not of the next one.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AFTTextConfig.model_type] = AFTForCausalLM.__name__
