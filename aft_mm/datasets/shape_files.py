"""Checks of shape files that trimesh lacks: the counts in a header against the content."""

import re
from pathlib import Path

_PLY_HEADER = re.compile(rb'ply\s.*?\nend_header\r?\n', re.S)
_PLY_ELEMENT = re.compile(rb'^element\s+\S+\s+(\d{1,18})\s*$', re.M)
_OFF = re.compile(r'\s*\w*OFF\s*(\d{1,18})[ \t]+(\d{1,18})[^\n]*')
_OBJ_ZERO = re.compile(rb'^[ \t]*f[^\n#]*[ \t]0(?:[/\s]|\Z)', re.M)
_OBJ_COMMA = re.compile(rb'^[ \t]*v[ \t][^\n#]*[,;]', re.M)
_OBJ_SHORT = re.compile(rb'^[ \t]*f(?:[ \t]+\S+){0,2}[ \t\r]*$', re.M)


def problem_of(path: Path) -> str:
    """Return why a file of a mesh or of points is not whole, '' if nothing is found."""
    check = _CHECKS.get(path.suffix.lower())
    return check(path.read_bytes()) if check else ''


def are_numbers(words: list[str]) -> bool:
    try:
        return bool([float(word) for word in words])
    except ValueError:
        return False


def ply_problem(data: bytes) -> str:
    """Return :func:`problem_of` for the content of a ``.ply`` file."""
    header = _PLY_HEADER.match(data)
    if not header or not re.search(rb'^format\s+ascii', header[0], re.M):
        return ''  # trimesh compares the sizes of a binary one
    announced = sum(map(int, _PLY_ELEMENT.findall(header[0])))
    found = sum(bool(line.strip()) for line in data[header.end() :].splitlines())
    return '' if found == announced else f'{announced} rows announced, {found} found'


def _off(data: bytes) -> str:
    text = re.sub('#.*', '', data.decode(errors='replace')).strip()
    header = _OFF.match(text)
    if not header:
        return 'it must begin with OFF and the numbers of vertices and faces'
    vertices, faces = int(header[1]), int(header[2])
    rows = [words for line in text[header.end() :].splitlines() if (words := line.split())]
    if len(rows) != vertices + faces:
        return f'{vertices} vertices and {faces} faces announced, {len(rows)} rows found'
    if not faces:
        return 'it has no faces'
    for row in rows[:vertices]:
        if len(row) != len(rows[0]) or not are_numbers(row) or len(row) < 3:
            return f'a vertex must be three numbers with spaces between, got {" ".join(row):.80}'
    for row in rows[vertices:]:
        corners = int(row[0]) if row[0].isdecimal() else 0
        indices = row[1 : corners + 1]
        if not 2 <= corners == len(indices):
            return (
                f'a face must be a number of corners and as many indices, got {" ".join(row):.80}'
            )
        if not all(index.isdecimal() and int(index) < vertices for index in indices):
            return f'indices of faces must be 0 to {vertices - 1}, got {" ".join(row):.80}'
    return ''


def _obj(data: bytes) -> str:
    if _OBJ_ZERO.search(data):
        return 'indices of faces must begin with 1, got 0'
    if _OBJ_COMMA.search(data):
        return 'a vertex must be three numbers with spaces between, got a comma or semicolon'
    return 'it has a face of fewer than three corners' if _OBJ_SHORT.search(data) else ''


def _stl(data: bytes) -> str:
    announced = int.from_bytes(data[80:84], 'little')
    found = max(0, len(data) - 84) / 50
    if found == announced:
        return ''
    if data.lstrip()[:5].lower() == b'solid' and b'\0' not in data[:512]:
        lines = data.rsplit(b'\n', 3)
        is_whole = any(line.strip().lower().startswith(b'endsolid') for line in lines[-3:])
        return '' if is_whole else 'it does not end with endsolid'
    return f'{announced} triangles announced, {found:.6g} found'


_CHECKS = {'.ply': ply_problem, '.off': _off, '.obj': _obj, '.stl': _stl}
