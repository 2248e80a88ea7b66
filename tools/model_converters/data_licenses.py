"""Licences of the data sets of the configs, and of weights that were trained on them.

docs/data.md has the table that `python tools/model_converters/data_licenses.py` prints.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

from aft_mm.cli.arguments import tool_parser
from aft_mm.errors import UserError

FREE = 'Apache-2.0'
NON_COMMERCIAL = 'CC-BY-NC-4.0'


class DataSet(NamedTuple):
    """A data set and the terms that its source states.

    `samples` says whether its pictures, texts, shapes or recordings may be published here.
    `weights` is the SPDX identifier for trained weights, or None if the terms do not settle it.
    """

    name: str
    terms: str
    samples: bool
    weights: str | None


RESEARCH = 'non-commercial research and education only'
# By folder below AFT_MM_DATA, or by class if a set has no folder.
DATA_SETS = {
    'aft_mm.Digits': DataSet('handwritten digits (UCI, in scikit-learn)', 'CC BY 4.0', True, FREE),
    'aft_mm.CopyTask': DataSet('copy task', 'generated', True, FREE),
    'imagenet': DataSet('ImageNet-1K', RESEARCH, False, NON_COMMERCIAL),
    'imagenette': DataSet('Imagenette', 'as ImageNet', False, NON_COMMERCIAL),
    'cifar10': DataSet('CIFAR-10', 'none stated', False, None),
    'cifar10_full': DataSet('CIFAR-10, 40,000 images', 'as CIFAR-10', False, None),
    'mnist': DataSet('MNIST', 'CC BY-SA 3.0', True, 'CC-BY-SA-3.0'),
    'celeba': DataSet('CelebA', f'{RESEARCH}; no copies or derived data', False, None),
    'coco': DataSet('COCO 2017', 'boxes CC BY 4.0; a licence per image', False, None),
    'coco_mini': DataSet('COCO, a few images', 'as COCO', False, None),
    'VOCdevkit': DataSet('PASCAL VOC', "Flickr's terms of use", False, None),
    'bccd': DataSet('BCCD', 'MIT', True, FREE),
    'ade': DataSet('ADE20K', f'labels BSD-3-Clause; images {RESEARCH}', False, NON_COMMERCIAL),
    'camvid': DataSet('CamVid', 'CC BY-NC 4.0', False, NON_COMMERCIAL),
    'enwik8': DataSet('enwik8', 'CC BY-SA 3.0, GFDL 1.2', True, 'CC-BY-SA-3.0'),
    'multi30k': DataSet('Multi30k', RESEARCH, False, NON_COMMERCIAL),
    'wmt14_en_de': DataSet('WMT14 English–German', 'research only', False, NON_COMMERCIAL),
    'ShapeNetCore.v2.PC15k': DataSet('ShapeNetCore v2', RESEARCH, False, NON_COMMERCIAL),
    'ModelNet10.PC15k': DataSet('ModelNet10', 'academic use only', False, NON_COMMERCIAL),
    'modelnet10_pcd': DataSet('ModelNet10, 1,024 points', 'as ModelNet10', False, NON_COMMERCIAL),
    'fsdd': DataSet('Free Spoken Digit Dataset', 'CC BY-SA 4.0', True, 'CC-BY-SA-4.0'),
    'yesno': DataSet('yesno', 'Apache-2.0, as its Kaldi tutorial', True, FREE),
    'an4_mfcc': DataSet('AN4', 'BSD-2-Clause (CMU)', True, FREE),
    'librispeech': DataSet('LibriSpeech', 'CC BY 4.0', True, FREE),
    'wsj': DataSet('Wall Street Journal', 'agreement with the LDC', False, None),
}


def strings(config: str, variable: str) -> Iterator[str]:
    try:
        statements = ast.parse(config).body
    except SyntaxError:
        return
    for statement in statements:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == variable:
            for node in ast.walk(statement.value):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def weights_license(config: str) -> str:
    """Return the licence of weights that a config trained, by the training data.

    Raises:
        UserError: The terms of the data do not settle it, or the training started from other
            weights.
    """
    parts = {
        part
        for string in strings(config, 'train_dataloader')
        for part in string.replace('\\', '/').split('/')
    }
    found = [DATA_SETS[name] for name in DATA_SETS if name in parts]
    licenses = {data.weights for data in found}
    if any(strings(config, 'load_from')) or 'Pretrained' in strings(config, 'model'):
        reason = 'the training started from other weights'
    elif len(licenses) != 1:
        names = ', '.join(data.name for data in found)
        reason = f'the licence does not follow from the training data ({names or "unknown"})'
    elif None in licenses:
        reason = f'the terms of {found[0].name} ({found[0].terms}) do not settle it'
    else:
        return found[0].weights
    raise UserError(f'--license must be given: {reason}')


def table() -> str:
    lines = ['| set | terms | samples | weights |', '| --- | --- | --- | --- |']
    for data in DATA_SETS.values():
        samples = 'yes' if data.samples else 'no'
        lines.append(f'| {data.name} | {data.terms} | {samples} | {data.weights or "–"} |')
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    tool_parser(__doc__).parse_args()
    print(table(), end='')
