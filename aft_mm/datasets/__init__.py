"""One file per kind of data."""

from .camvid_objects import CamVidObjects
from .celeba import CelebA
from .cifar_binary import CIFAR10Binary
from .copy_task import CopyTask
from .digits import Digits
from .file_dataset import FileDataset, UnusableFile
from .fsdd import FSDD
from .image_files import read_rgb
from .image_folder import ImageFolder
from .length_buckets import LengthBatchSampler
from .mnist_idx import MNISTIdx
from .parallel_text import ParallelText, read_lines
from .point_clouds import PointClouds
from .point_files import read_points
from .sound_files import filter_banks, read_sound
from .text_file import TextFile
from .token_batches import TokenBatchSampler
from .transcripts import read_transcripts
from .transforms import (
    LoadPoints,
    LoadRGBImage,
    LoadUtterance,
    NormalizeFeatures,
    PackPointCloud,
    PackSequence,
    PackUtterance,
    RandomValueShift,
    SpecAugment,
    StackFrames,
    SuperResolutionPair,
)
from .utterances import KaldiFeatures, SpeechFolder, SphinxFeatures, Utterances

__all__ = [
    'CIFAR10Binary',
    'CamVidObjects',
    'CelebA',
    'CopyTask',
    'Digits',
    'FSDD',
    'FileDataset',
    'ImageFolder',
    'KaldiFeatures',
    'LengthBatchSampler',
    'LoadPoints',
    'LoadRGBImage',
    'LoadUtterance',
    'MNISTIdx',
    'NormalizeFeatures',
    'PackPointCloud',
    'PackSequence',
    'PackUtterance',
    'ParallelText',
    'PointClouds',
    'RandomValueShift',
    'SpecAugment',
    'SpeechFolder',
    'SphinxFeatures',
    'StackFrames',
    'SuperResolutionPair',
    'TextFile',
    'TokenBatchSampler',
    'UnusableFile',
    'Utterances',
    'filter_banks',
    'read_lines',
    'read_points',
    'read_rgb',
    'read_sound',
    'read_transcripts',
]
