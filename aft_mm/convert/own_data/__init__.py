from .boxes import coco, voc
from .image_folder import image_folder
from .masks import masks
from .parts import OwnData, split_by_label
from .text import text

__all__ = ['OwnData', 'coco', 'image_folder', 'masks', 'split_by_label', 'text', 'voc']
