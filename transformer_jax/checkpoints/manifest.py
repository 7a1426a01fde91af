"""The manifest of a checkpoint: what it holds and the checksum of every file, written last and all at once.

A step is finished when `manifest.json` lies in its folder, and only then; a process killed before that leaves a step
which is not counted. The file lists arrays by name, shape and dtype, so that nothing need be loaded to know them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from etils import epath

from transformer_jax.checkpoints.names import ArrayInfo
from transformer_jax.errors import UserError

MANIFEST = 'manifest.json'
ARRAYS = 'arrays'
_FORMAT = 1
_CHUNK_BYTES = 1 << 22


class Damaged(Exception):
    """A checkpoint which cannot be trusted; the text says which file and why."""


def to_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `metadata` as plain JSON values; numpy and jax scalars become numbers.

    Raises:
      UserError: naming what is not JSON.
    """

    def plain(value: Any) -> Any:
        if getattr(value, 'ndim', None) == 0 and hasattr(value, 'dtype'):
            return np.asarray(value).item()
        raise UserError(f'checkpoint metadata holds a {type(value).__name__}, which is not JSON: {value!r}')

    return json.loads(json.dumps(dict(metadata), default=plain))


def write(
    folder: epath.Path,
    *,
    step: int,
    metadata: Mapping[str, Any],
    versions: Mapping[str, str],
    arrays: Mapping[str, ArrayInfo],
) -> None:
    """Checksums the files below `folder / 'arrays'` and writes the manifest, which finishes the checkpoint."""
    files = {name: _checksum(folder / name) for name in _list_files(folder, ARRAYS)}
    record = {
        'format': _FORMAT,
        'step': step,
        'metadata': metadata,
        'versions': versions,
        'arrays': {name: info._asdict() for name, info in arrays.items()},
        'files': files,
    }
    text = json.dumps({'sha256': _digest(record), **record}, indent=1)
    unfinished = folder / f'{MANIFEST}.unfinished'
    unfinished.write_text(text)
    unfinished.replace(folder / MANIFEST)


def read(folder: epath.Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint, its arrays as {name: ArrayInfo}.

    Raises:
      Damaged: if it is absent, unreadable or altered.
    """
    path = folder / MANIFEST
    try:
        record = json.loads(path.read_text())
        digest = record.pop('sha256')
        intact = digest == _digest(record)
    except FileNotFoundError:
        raise Damaged(f'{MANIFEST} is missing: the save was not finished') from None
    except OSError as error:
        raise Damaged(f'{MANIFEST} cannot be read: {error.strerror or error}') from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise Damaged(f'{MANIFEST} is not a whole JSON record') from None
    if not intact:
        raise Damaged(f'{MANIFEST} was altered: its checksum differs')
    if record['format'] != _FORMAT:
        raise UserError(f'{folder} has checkpoint format {record["format"]}; this version reads format {_FORMAT}')
    record['arrays'] = {
        name: ArrayInfo(tuple(info['shape']), info['dtype'], info['bytes']) for name, info in record['arrays'].items()
    }
    return record


def files_for(record: Mapping[str, Any], wanted: Collection[str]) -> dict[str, tuple[int, str]]:
    """Returns {file: (bytes, SHA-256)} needed to read the arrays `wanted`: theirs and the common ones."""
    others = tuple(f'{ARRAYS}/{name.replace("/", ".")}/' for name in record['arrays'] if name not in wanted)
    return {file: tuple(checksum) for file, checksum in record['files'].items() if not file.startswith(others)}


def verify(
    folder: epath.Path, files: Mapping[str, tuple[int, str]], part: int = 0, parts: int = 1, *, contents: bool = True
) -> None:
    """Compares every `parts`-th of some files of a checkpoint, from number `part`, with its size and checksum.

    Without `contents` only sizes are compared, so that no file is read.

    Raises:
      Damaged: naming the first file which is missing, unreadable, shortened or altered.
    """
    for name, (size, digest) in sorted(files.items())[part::parts]:
        try:
            found_size, found_digest = _checksum(folder / name) if contents else (_size(folder / name), digest)
        except FileNotFoundError:
            raise Damaged(f'{name} is missing') from None
        except OSError as error:
            raise Damaged(f'{name} cannot be read: {error.strerror or error}') from None
        if found_size != size:
            raise Damaged(f'{name} has {found_size} bytes instead of {size}')
        if found_digest != digest:
            raise Damaged(f'{name} was altered: its checksum differs')


def _list_files(root: epath.Path, name: str) -> list[str]:
    found = []
    for child in (root / name).iterdir():
        path = f'{name}/{child.name}'
        found += _list_files(root, path) if child.is_dir() else [path]
    return sorted(found)


def _checksum(path: epath.Path) -> tuple[int, str]:
    """Returns size in bytes and SHA-256 of a file, read in pieces."""
    size, digest = 0, hashlib.sha256()
    with path.open('rb') as file:
        while piece := file.read(_CHUNK_BYTES):
            size += len(piece)
            digest.update(piece)
    return size, digest.hexdigest()


def _size(path: epath.Path) -> int:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return path.stat().length


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
