"""Package metadata; the settings of the tools are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
EXPORT = ['onnx', 'onnxruntime', 'onnxscript']
# Subwords and BLEU of translation.
TEXT = ['sentencepiece', 'sacrebleu']
# Filter banks; WAV, FLAC and OGG; Kaldi's archives; error rates.
SPEECH = ['torchaudio', 'soundfile', 'kaldi-native-io', 'jiwer']
VERSION = re.search(r"__version__ = '(.+)'", (ROOT / 'aft_mm/__init__.py').read_text()).group(1)

setup(
    name='aft_mm',
    version=VERSION,
    description='Attention Free Transformer for mmengine and mmpretrain',
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    packages=find_packages(include=['aft_mm', 'aft_mm.*']),
    package_data={'aft_mm.visualization': ['explorer.html', 'explorer.js']},
    # mmengine 0.10.7 calls pkgutil.find_loader, which 3.14 has no more.
    python_requires='>=3.11,<3.14',
    install_requires=[
        # Compiling AFT needs 2.6, where torch.cond has a gradient.
        'torch>=2.4',
        'torchvision',
        'numpy',
        'pillow>=10.1',
        'matplotlib',
        'mmengine>=0.10.7,<1',
        'mmpretrain>=1.2,<2',
        # mmdet 3.3 and mmseg 1.2 refuse 2.2. The compiled mmcv holds the same files and its
        # operators on top, so the extra below can be installed over it.
        'mmcv-lite>=2.1,<2.2',
        'scikit-learn',
        # PSNR and SSIM; meshes, .ply and .obj; .pcd files, the compressed ones too.
        'torchmetrics',
        'trimesh',
        'pypcd4',
        # The autoregressive configs log to it.
        'tensorboard',
        'rich',
        # mmengine imports pkg_resources.
        'setuptools<82',
    ],
    extras_require={
        'downstream': [
            'mmcv>=2.1,<2.2', 'mmdet>=3.3,<3.4', 'mmsegmentation>=1.2,<1.3', 'ftfy', 'regex'
        ],
        # fla-core holds the kernels of flash-linear-attention; they need a GPU.
        'bench': ['timm', 'aft-pytorch', 'fla-core; platform_system == "Linux"'],
        'text': TEXT,
        'speech': SPEECH,
        # Class activation maps. mmpretrain's vis_cam.py needs 1.4, which shares OpenCV with mmcv;
        # 1.5 brings a second one, headless.
        'analysis': ['grad-cam>=1.4.8'],
        'docs': ['sphinx', 'myst-nb', 'furo', 'latex2mathml', 'nbclient', 'ipykernel'],
        'export': EXPORT,
        'dev': [
            'pytest', 'pytest-xdist', 'ruff', 'mypy', 'timm', 'grad-cam>=1.4.8', *EXPORT, *TEXT,
            *SPEECH
        ],
    },
    classifiers=[
        'Programming Language :: Python :: 3',
        'Operating System :: OS Independent',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
)
