"""Licences of the data sets of the configs, and of weights that were trained on them."""

import argparse
import ast
from collections.abc import Iterator
from typing import NamedTuple

from aft_mm.config.texts import assigned
from aft_mm.errors import UserError

FREE = 'Apache-2.0'
NON_COMMERCIAL = 'CC-BY-NC-4.0'


class DataSet(NamedTuple):
    """A data set and the terms that its source states.

    `samples` says whether its samples may be published here. `weights` is the SPDX identifier for
    trained weights, None if the terms do not settle it. `types` are the classes of the configs that
    read it.
    """

    name: str
    terms: str
    samples: bool
    weights: str | None
    types: str = ''


RESEARCH = 'non-commercial research and education only'
# By folder below AFT_MM_DATA, or by class if a set has no folder.
DATA_SETS = {
    'aft_mm.Digits': DataSet('handwritten digits (UCI, in scikit-learn)', 'CC BY 4.0', True, FREE),
    'aft_mm.CopyTask': DataSet('copy task', 'generated', True, FREE),
    'aft_mm.AssociativeRecall': DataSet('associative recall', 'generated', True, FREE),
    'aft_mm.ListOps': DataSet('ListOps', 'generated', True, FREE),
    'aft_mm.Pathfinder': DataSet('Pathfinder', 'generated', True, FREE),
    'imagenet': DataSet('ImageNet-1K', RESEARCH, False, NON_COMMERCIAL, 'ImageNet'),
    'imagenette': DataSet('Imagenette', 'as ImageNet', False, NON_COMMERCIAL, 'ImageNet'),
    'cifar10': DataSet('CIFAR-10', 'none stated', False, None, 'CIFAR10 aft_mm.CIFAR10Binary'),
    'cifar10_full': DataSet(
        'CIFAR-10, 40,000 images', 'as CIFAR-10', False, None, 'aft_mm.CIFAR10Binary'
    ),
    'mnist': DataSet('MNIST', 'CC BY-SA 3.0', True, 'CC-BY-SA-3.0', 'aft_mm.MNISTIdx'),
    'celeba': DataSet(
        'CelebA', f'{RESEARCH}; no copies or derived data', False, None, 'aft_mm.CelebA'
    ),
    'coco': DataSet(
        'COCO 2017', 'boxes CC BY 4.0; a licence per image', False, None, 'CocoDataset'
    ),
    'coco_mini': DataSet('COCO, a few images', 'as COCO', False, None, 'CocoDataset'),
    'VOCdevkit': DataSet('PASCAL VOC', "Flickr's terms of use", False, None, 'VOCDataset'),
    'bccd': DataSet('BCCD', 'MIT', True, FREE, 'CocoDataset VOCDataset'),
    'ade': DataSet(
        'ADE20K', f'labels BSD-3-Clause; images {RESEARCH}', False, NON_COMMERCIAL, 'ADE20KDataset'
    ),
    'camvid': DataSet(
        'CamVid', 'CC BY-NC 4.0', False, NON_COMMERCIAL, 'BaseSegDataset aft_mm.CamVidObjects'
    ),
    'enwik8': DataSet('enwik8', 'CC BY-SA 3.0, GFDL 1.2', True, 'CC-BY-SA-3.0', 'aft_mm.TextFile'),
    'multi30k': DataSet('Multi30k', RESEARCH, False, NON_COMMERCIAL, 'aft_mm.ParallelText'),
    'wmt14_en_de': DataSet(
        'WMT14 English–German', 'research only', False, NON_COMMERCIAL, 'aft_mm.ParallelText'
    ),
    'ShapeNetCore.v2.PC15k': DataSet(
        'ShapeNetCore v2', RESEARCH, False, NON_COMMERCIAL, 'aft_mm.PointClouds'
    ),
    'ModelNet10.PC15k': DataSet(
        'ModelNet10', 'academic use only', False, NON_COMMERCIAL, 'aft_mm.PointClouds'
    ),
    'modelnet10_pcd': DataSet(
        'ModelNet10, 1,024 points', 'as ModelNet10', False, NON_COMMERCIAL, 'aft_mm.PointClouds'
    ),
    'fsdd': DataSet(
        'Free Spoken Digit Dataset', 'CC BY-SA 4.0', True, 'CC-BY-SA-4.0', 'aft_mm.FSDD'
    ),
    'yesno': DataSet(
        'yesno', 'Apache-2.0, as its Kaldi tutorial', True, FREE, 'aft_mm.SpeechFolder'
    ),
    'an4_mfcc': DataSet('AN4', 'BSD-2-Clause (CMU)', True, FREE, 'aft_mm.SphinxFeatures'),
    'librispeech': DataSet('LibriSpeech', 'CC BY 4.0', True, FREE, 'aft_mm.SpeechFolder'),
    'wsj': DataSet(
        'Wall Street Journal', 'agreement with the LDC', False, None, 'aft_mm.KaldiFeatures'
    ),
}


def setting(config: str, variable: str, key: str) -> str | None:
    """Return the text of ``variable.key`` in the text of a config, without running it."""
    value = assigned(config, variable)
    keywords = value.keywords if isinstance(value, ast.Call) else []
    return next((ast.unparse(word.value) for word in keywords if word.arg == key), None)


def strings(config: str, variable: str) -> Iterator[str]:
    value = assigned(config, variable)
    for node in ast.walk(value) if value else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def training_data(config: str) -> list[DataSet]:
    """Return the data sets on which a config trains, those of :data:`DATA_SETS`."""
    parts = {
        part
        for string in strings(config, 'train_dataloader')
        for part in string.replace('\\', '/').split('/')
    }
    return [
        data
        for name, data in DATA_SETS.items()
        if name in parts and (not data.types or parts & {*data.types.split()})
    ]


def weights_license(config: str) -> str:
    """Return the licence of weights that a config trained, by the training data.

    Raises:
        UserError: The terms of the data do not settle it, or the training started from other
            weights.
    """
    data_sets = training_data(config)
    licenses = {data.weights for data in data_sets}
    if any(strings(config, 'load_from')) or 'Pretrained' in strings(config, 'model'):
        reason = 'the training started from other weights'
    elif len(licenses) != 1:
        names = ', '.join(data.name for data in data_sets)
        reason = f'the licence does not follow from the training data ({names or "unknown"})'
    elif (weights := data_sets[0].weights) is None:
        reason = f'the terms of {data_sets[0].name} ({data_sets[0].terms}) do not settle it'
    else:
        return weights
    raise UserError(f'--license must be given: {reason}')


def table() -> str:
    lines = ['| set | terms | samples | weights |', '| --- | --- | --- | --- |']
    for data in DATA_SETS.values():
        samples = 'yes' if data.samples else 'no'
        lines.append(f'| {data.name} | {data.terms} | {samples} | {data.weights or "–"} |')
    return '\n'.join(lines) + '\n'


def run(args: argparse.Namespace) -> None:
    print(table(), end='')
