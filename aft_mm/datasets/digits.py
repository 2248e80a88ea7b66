from typing import Any

import numpy as np
from mmengine.dataset import BaseDataset

from aft_mm.checks import check_choice
from aft_mm.registry import DATASETS


@DATASETS.register_module()
class Digits(BaseDataset):
    """The 1,797 handwritten digits of 8 x 8 pixels in scikit-learn (UCI optdigits).

    A sample is ``dict(img=uint8 [8, 8, 1], gt_label=int)``, grey levels 0 (paper) to 255 (ink).

    Args:
        split: ``'train'``, or ``'test'``, a fifth of every class.
        **kwargs: See :class:`mmengine.dataset.BaseDataset`.

    Raises:
        ImportError: If scikit-learn is not installed.
        ValueError: If ``split`` is unknown.
    """

    METAINFO = dict(classes=tuple('0123456789'))

    def __init__(self, split: str = 'train', **kwargs: Any) -> None:
        check_choice('split', split, ('train', 'test'))
        self.split = split
        super().__init__(**kwargs)

    def load_data_list(self) -> list[dict]:
        try:
            from sklearn.datasets import load_digits
            from sklearn.model_selection import train_test_split
        except ImportError as error:
            raise ImportError(
                'Digits needs the images of scikit-learn: pip install scikit-learn'
            ) from error

        digits = load_digits()
        chosen = train_test_split(
            np.arange(len(digits.target)), test_size=0.2, stratify=digits.target, random_state=0
        )[self.split == 'test']
        # Ink is 0 to 16.
        images = np.rint(digits.images[..., None] * (255 / 16)).astype(np.uint8)
        return [dict(img=images[i], gt_label=int(digits.target[i])) for i in chosen]
