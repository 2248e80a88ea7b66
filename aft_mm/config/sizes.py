from typing import TYPE_CHECKING

from aft_mm.errors import UserError
from aft_mm.images import image_size

from .masks import mask_files

if TYPE_CHECKING:  # mmengine imports torch, which takes seconds
    from mmengine.config import Config, ConfigDict


def input_size(config: 'Config') -> tuple[int, int] | None:
    """Return the height and width of the images of a test, None if the config does not tell.

    For a classifier these are the ``img_size`` of the backbone, for others the scale to which the
    test resizes, or the size of the first image of a segmentor or of a batch in training.
    """
    size = config.model.backbone.get('img_size')
    if not config.model.type.endswith('ImageClassifier'):
        dataset = (config.get('test_dataloader') or {}).get('dataset') or {}
        steps = dataset.get('pipeline') or ()
        scales = [step.get('scale') for step in steps if step['type'].endswith('Resize')]
        scales = [scale for scale in scales if isinstance(scale, list | tuple)]
        prepares = (config.model.get('data_preprocessor') or {}).get('preprocessor') or {}
        size = scales[0][::-1] if scales else _first_size(dataset) or prepares.get('size') or size
    return (size, size) if isinstance(size, int) else size and tuple(size)


def _first_size(dataset: 'ConfigDict') -> tuple[int, int] | None:
    if not dataset.get('type', '').endswith('BaseSegDataset'):
        return None
    try:
        images, _, names = mask_files(dataset.get('data_root') or '', dataset)
        first = f'{names[0]}{dataset.get("img_suffix", ".jpg")}' if names else ''
        return image_size(images / first)[::-1] if first else None
    except (OSError, UserError):  # data of another machine
        return None
