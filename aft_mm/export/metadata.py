"""What the file of a graph says about itself: how its images are made, and what its outputs mean."""

from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import TRANSFORMS, DefaultScope

from aft_mm.apis.image_classifier import takes_bgr
from aft_mm.structures import DATASET_META

#: Tasks by type of the model.
TASKS = {
    'ImageClassifier': 'classification',
    'EncoderDecoder': 'segmentation',
    'RetinaNet': 'detection',
    'AutoregressiveModel': 'generation',
    'CTCModel': 'transcription',
}


def type_of(config: Config) -> str:
    return config.model.type.rpartition('.')[2]


def describe_images(config: Config, model: Any, channels: int) -> dict[str, Any]:
    """Return how an image file becomes the input of a graph, and the classes.

    - ``classes``, ``palette``, ``best_f1_score``: as the checkpoint has them
    - ``resize``: steps of the test pipeline with all their arguments
    - ``mean``, ``std``: [channels], for pixels of 0 to 255, in the order of the input's channels
    - ``channels``: this order, RGB, BGR or grey
    """
    about = {key: model.dataset_meta[key] for key in DATASET_META if key in model.dataset_meta}
    steps = config.get('test_dataloader', {}).get('dataset', {}).get('pipeline')
    if steps is not None:
        with DefaultScope.overwrite_default_scope(config.get('default_scope', 'mmengine')):
            built = [TRANSFORMS.build(step) for step in steps]
        about['resize'] = [
            {'type': type(step).__name__, **vars(step)}
            for step in built
            if not type(step).__name__.startswith(('Load', 'Pack'))
        ]
    # Measured, as each library has names of its own for what its preprocessor does.
    images = torch.zeros(1 + channels, channels, 1, 1, dtype=torch.uint8)
    for channel in range(channels):
        images[1 + channel, channel] = 255
    batch = model.data_preprocessor(dict(inputs=list(images), data_samples=None), False)
    black, *bright = batch['inputs'][:, :channels, 0, 0]
    changes = torch.stack(bright) - black
    std = 255 / changes.amax(0)
    about['mean'], about['std'] = (
        [float(f'{value:.7g}') for value in values.tolist()] for values in (0 - black * std, std)
    )
    if channels == 3:
        names = 'BGR' if takes_bgr(config) else 'RGB'
        about['channels'] = ''.join(names[channel] for channel in changes.argmax(0).tolist())
    elif channels == 1:
        about['channels'] = 'grey'
    return about
