"""What the models of benchmark_models.py are called."""

import argparse
import re

CHANNELS = dict(tiny=192, small=384, base=768)
# Models of timm, and the DeiT of about as many parameters.
RIVALS = dict(
    deit3_small_patch16_224='small',
    vit_relpos_small_patch16_224='small',
    convnext_tiny='small',
    convnext_femto='tiny',
)


def parse_name(text: str) -> tuple[str, str, int, int]:
    """Kind, size, heads and kernel of 'deit-tiny', 'aft-small-h384-k11' or 'bound-tiny-h32-k11'.

    Of a rival, the size of the DeiT that it is held against.
    """
    if text in RIVALS:
        return 'rival', RIVALS[text], 0, 0
    archs = '|'.join(CHANNELS)
    if found := re.fullmatch(f'deit-({archs})', text):
        return 'deit', found[1], 0, 0
    if found := re.fullmatch(rf'(aft|bound)-({archs})-h(\d+)-k(\d+)', text):
        return found[1], found[2], int(found[3]), int(found[4])
    raise argparse.ArgumentTypeError(
        'a model must be deit-ARCH, aft-ARCH-hHEADS-kKERNEL or bound-ARCH-hHEADS-kKERNEL with '
        f'ARCH among {", ".join(CHANNELS)}, or one of {", ".join(RIVALS)}, got {text!r}'
    )
