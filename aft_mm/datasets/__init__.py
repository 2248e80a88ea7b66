"""One file per kind of data."""

from .camvid_objects import CamVidObjects
from .celeba import CelebA
from .cifar_binary import CIFAR10Binary
from .copy_task import CopyTask
from .digits import Digits
from .file_dataset import FileDataset, UnusableFile
from .image_files import read_rgb
from .image_folder import ImageFolder
from .mnist_idx import MNISTIdx
from .parallel_text import ParallelText, read_lines
from .point_clouds import PointClouds
from .point_files import read_points
from .text_file import TextFile
from .token_batches import TokenBatchSampler
from .transforms import (
    LoadPoints,
    LoadRGBImage,
    PackPointCloud,
    PackSequence,
    RandomValueShift,
    SuperResolutionPair,
)

__all__ = [
    'CIFAR10Binary',
    'CamVidObjects',
    'CelebA',
    'CopyTask',
    'Digits',
    'FileDataset',
    'ImageFolder',
    'LoadPoints',
    'LoadRGBImage',
    'MNISTIdx',
    'PackPointCloud',
    'PackSequence',
    'ParallelText',
    'PointClouds',
    'RandomValueShift',
    'SuperResolutionPair',
    'TextFile',
    'TokenBatchSampler',
    'UnusableFile',
    'read_lines',
    'read_points',
    'read_rgb',
]
