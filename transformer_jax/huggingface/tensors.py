"""Files of tensors: safetensors, in one file or in shards with an index, read one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors
from safetensors.numpy import save_file

from transformer_jax.errors import UserError

SINGLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
_FLOATS = {'F32': 'float32', 'F16': 'float16', 'BF16': 'bfloat16', 'F64': 'float64'}


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object.

    Raises:
      UserError: where the file is missing, is no JSON, or holds something else than an object.
    """
    try:
        values = json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
        raise UserError(f'{path} does not exist') from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f'{path} cannot be read as JSON: {error}') from None
    if not isinstance(values, dict):
        raise UserError(f'{path} holds a {type(values).__name__}; it should be a JSON object')
    return values


class Tensors(Protocol):
    """The tensors of a checkpoint by name.

    Attributes:
      shapes: shape of each tensor; dtypes: its type, as the file names it.
    """

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def is_float(self, name: str) -> bool: ...

    def read(self, name: str) -> np.ndarray: ...


class TensorFolder:
    """The tensors of a checkpoint folder by name; only headers are read until a tensor is asked for.

    Attributes:
      shapes: shape of each tensor; dtypes: its type, as safetensors names it ('F32', 'BF16', 'I64' ...).

    Raises:
      UserError: for a folder without safetensors, a shard which is missing, or a file which is cut short or damaged.
    """

    def __init__(self, folder: Path):
        self._opened, self._file_of = {}, {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        promised = None
        if (folder / INDEX).exists():
            promised = read_json(folder / INDEX).get('weight_map')
            if not isinstance(promised, dict):
                raise UserError(f"{folder / INDEX} has no 'weight_map' of tensor names to files")
            files = sorted(set(promised.values()))
        elif (folder / SINGLE).exists():
            files = [SINGLE]
        else:
            others = sorted(path.name for path in folder.glob('*.bin')) if folder.is_dir() else []
            hint = f' ({others[0]} is a pickle, which is never opened; convert it to safetensors)' if others else ''
            raise UserError(f'{folder} has neither {SINGLE} nor {INDEX}{hint}')
        for file in files:
            self._open(folder / file)
        missing = [name for name in promised or () if name not in self.shapes]
        if missing:
            raise UserError(f'{folder / INDEX} promises tensors which no shard holds: {", ".join(missing)}')

    def _open(self, path: Path):
        if not path.exists():
            raise UserError(f'{path} does not exist, though {INDEX} names it')
        try:
            opened = safetensors.safe_open(path, framework='numpy')
        except (safetensors.SafetensorError, OSError) as error:
            size = path.stat().st_size
            raise UserError(f'{path} ({size} bytes) is cut short or is no safetensors file: {error}') from None
        for name in opened.keys():  # noqa: SIM118, which would need iteration that safe_open lacks
            view = opened.get_slice(name)
            self._file_of[name] = path
            self.shapes[name], self.dtypes[name] = tuple(view.get_shape()), view.get_dtype()
        self._opened[path] = opened

    def is_float(self, name: str) -> bool:
        """Whether a tensor holds floating-point numbers of 16 bits or more."""
        return self.dtypes[name] in _FLOATS

    def widest_float(self, names: Iterable[str]) -> str:
        """Returns 'bfloat16' where all the given tensors are, else 'float32', which holds float16 exactly too."""
        return 'bfloat16' if {self.dtypes[name] for name in names} == {'BF16'} else 'float32'

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor."""
        return self._opened[self._file_of[name]].get_tensor(name)


def write_tensors(folder: Path, tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int) -> list[str]:
    """Writes tensors in the order given, one file in memory at a time; more than one file gets an index.

    Returns:
      The names of the files.
    """
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray] = {}
    total = 0

    def flush():
        save_file(pending, folder / f'model-{len(shards):05d}.safetensors', metadata={'format': 'pt'})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(held.nbytes for held in pending.values()) + tensor.nbytes > shard_bytes:
            flush()
        pending[name] = np.ascontiguousarray(tensor)
        total += tensor.nbytes
    flush()
    names = [SINGLE] if len(shards) == 1 else [
        f'model-{i + 1:05d}-of-{len(shards):05d}.safetensors' for i in range(len(shards))
    ]  # fmt: skip
    for i, name in enumerate(names):
        (folder / f'model-{i:05d}.safetensors').rename(folder / name)
    # What an earlier export left would be read instead of, or beside, this one.
    for old in (folder / INDEX, *folder.glob('model*.safetensors')):
        if old.name not in names:
            old.unlink(missing_ok=True)
    if len(names) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + '\n', encoding='utf-8')
    return names
