"""Compare the model of a config with that of the training of a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aft_mm.openmmlab import warn

from .texts import entry, type_name

# Options of the training, the machine, the use and the padding, and sizes of which the loading warns.
OTHER = {'init_cfg', 'train_cfg', 'test_cfg', 'frozen_stages', 'norm_eval', 'with_cp', 'pretrained'}
OTHER |= {'backend', 'bfloat16', 'topk', 'thr', 'beam_size', 'cal_acc', '_scope_', '_delete_'}
OTHER |= {'img_size', 'grid', 'with_mask_channel', 'out_type'}
# What counts of a preprocessor.
PIXELS = {'preprocessor', 'mean', 'std', 'to_rgb', 'bgr_to_rgb', 'rgb_to_bgr'}


class Default:
    def __repr__(self) -> str:
        return 'its default'


DEFAULT = Default()


def options(part: Any, place: str = '') -> Iterator[tuple[str, Any]]:
    """Yield the place and value of what decides on the outputs of a model."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            name = str(key)
            if place.endswith('preprocessor') and name not in PIXELS:
                continue
            if name not in OTHER and 'drop' not in name and 'loss' not in name:
                yield from options(value, f'{place}.{name}' if place else name)
    elif isinstance(part, Sequence) and any(isinstance(value, Mapping) for value in part):
        for number, value in enumerate(part):
            yield from options(value, f'{place}.{number}')
    elif place.endswith('.type') or place == 'type':
        name = type_name(part)
        yield place, 'BN' if name == 'SyncBN' else name  # mmengine makes it BN in one process
    else:
        yield place, plain(part)


def plain(value: Any) -> Any:
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


def model_options(model: Mapping, preprocessor: Mapping | None) -> dict[str, Any]:
    return dict(options({**model, **({'preprocessor': preprocessor} if preprocessor else {})}))


def differences(
    now: Mapping[str, Any], before: Mapping[str, Any], form: str, inside: str = ''
) -> str:
    """Name the first three options that differ, '' if none does.

    Args:
        now, before: Options by place.
        form: Format of the place, its value now and that before.
        inside: Part of the places that are compared.
    """
    differ = [
        # A place may be from a checkpoint.
        form.format(
            f'{place!r:.80}'.strip("'"), *(f'{x.get(place, DEFAULT)!r:.80}' for x in (now, before))
        )
        for place in dict.fromkeys([*now, *before])
        if inside in place and now.get(place, DEFAULT) != before.get(place, DEFAULT)
    ]
    return '; '.join(differ[:3]) + f' and {len(differ) - 3} more' * (len(differ) > 3)


def warn_of_other_options(config: Mapping, trained: str, inside: str = '') -> None:
    """Warn of options of a model that the config of its checkpoint has otherwise.

    Equal shapes hide them: ``num_heads``, a gate, or softmax in the place of linear attention.

    Args:
        config: With the entries ``model`` and ``data_preprocessor``.
        trained: Text of the config in the checkpoint; it is not executed.
        inside: Part of the places that are compared, such as 'token_mixer'.
    """
    model = entry(trained, 'model')
    if not model:
        return
    before = model_options(model, entry(trained, 'data_preprocessor'))
    model = config['model'].get('module', config['model'])  # inside of a test-time augmentation
    now = model_options(model, config.get('data_preprocessor'))
    differ = differences(now, before, '{}={}, trained with {}', inside)
    if differ:
        warn(f'the model has other options than its weights: {differ}')
