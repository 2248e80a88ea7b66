from collections import Counter
from pathlib import Path

from aft_mm.config.texts import literal
from aft_mm.errors import UserError
from aft_mm.packed import MAX_RATIO, packed_as, read_packed

from .parts import OwnData

#: Least size of a text [bytes]: its validation part, 5 %, is one context.
LEAST_TEXT = 20 * 256


def text(path: Path, share: float, seed: int) -> OwnData:
    if not path.is_file():
        raise UserError(f'text {str(path)!r} must be one file; join several with `cat`')
    try:
        if packed_as(path, 'text') is not None:
            data = read_packed(path, MAX_RATIO * path.stat().st_size, 'text')
        else:
            data = path.read_bytes()
        content = data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f'text {str(path)!r} must be UTF-8, which byte {error.start} is not'
        ) from error
    except OSError as error:
        raise UserError(f'text {str(path)!r} cannot be read: {error}') from error
    if '\0' in content:
        raise UserError(f'text {str(path)!r} must be a text, got a zero byte')
    if len(data) < LEAST_TEXT:
        raise UserError(
            f'text {str(path)!r} must have at least {LEAST_TEXT:,} bytes, got {len(data):,}'
        )
    about = [f'{len(data):,} bytes, {len(content):,} characters']
    if '\r\n' in content:
        about.append('lines end in CRLF, which the model learns as two bytes')
    elif '\r' in content and '\n' not in content:
        about.append('lines end in CR alone, without LF')
    if content.startswith('\ufeff'):
        about.append('begins with a byte order mark, which the model learns as three bytes')
    if len(set(data)) == 1:
        about.append(f'{content[0]!r} alone, of which nothing can be learned')
    loader = 'dict(dataset=dict(data_file=data_file))'
    return OwnData(
        about=about,
        counts=Counter(),
        parts={'train': len(data) * 9 // 10, 'val': len(data) // 20},
        config=[
            f'data_file = {literal(path)}',
            '',
            *(f'{part}_dataloader = {loader}' for part in ('train', 'val', 'test')),
        ],
    )
