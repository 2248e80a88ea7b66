"""The model of a config beside the one that a checkpoint was trained with."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aft_mm.openmmlab import warn

from .texts import entry

# Options of the training and of the machine, and sizes of which the loading of weights warns.
OTHER = {'init_cfg', 'train_cfg', 'test_cfg', 'frozen_stages', 'norm_eval', 'with_cp', 'pretrained'}
OTHER |= {'img_size', 'grid', 'backend', 'bfloat16', 'topk', 'cal_acc', '_scope_', '_delete_'}
# What counts of a preprocessor.
PIXELS = {'mean', 'std', 'to_rgb', 'bgr_to_rgb'}


class Default:
    def __repr__(self) -> str:
        return 'its default'


DEFAULT = Default()


def options(part: Any, place: str = '') -> Iterator[tuple[str, Any]]:
    """Yield the place and value of what decides on the outputs of a model."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            if place.endswith('preprocessor') and key not in PIXELS:
                continue
            if key not in OTHER and 'drop' not in key and 'loss' not in key:
                yield from options(value, f'{place}.{key}' if place else key)
    elif isinstance(part, Sequence) and any(isinstance(value, Mapping) for value in part):
        for number, value in enumerate(part):
            yield from options(value, f'{place}.{number}')
    else:
        if place.endswith('.type') or place == 'type':
            part = str(part).rpartition('.')[2]
        yield place, tuple(part) if isinstance(part, list) else part


def model_options(model: Mapping, preprocessor: Mapping | None) -> dict[str, Any]:
    return dict(options({**model, **({'preprocessor': preprocessor} if preprocessor else {})}))


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
    now = model_options(config['model'], config.get('data_preprocessor'))
    differ = [
        f'{place}={now.get(place, DEFAULT)!r}, trained with {before.get(place, DEFAULT)!r}'
        for place in dict.fromkeys([*now, *before])
        if inside in place and now.get(place, DEFAULT) != before.get(place, DEFAULT)
    ]
    if differ:
        more = f' and {len(differ) - 3} more' if len(differ) > 3 else ''
        warn(f'the model has other options than its weights: {"; ".join(differ[:3])}{more}')
