"""Parameters out of a checkpoint without the model or the optimizer: for decoding, notebooks and fine-tuning."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from transformer_jax.checkpoints import manifest, names, steps, storage
from transformer_jax.checkpoints.names import ArrayInfo
from transformer_jax.errors import UserError

_log = logging.getLogger(__name__)
Folder = str | os.PathLike[str]


class Partial(NamedTuple):
    """Parameters of which `taken` came from a checkpoint and `kept` did not; `unused` lists what else it holds."""

    params: Any
    taken: list[str]
    kept: list[str]
    unused: list[str]


def list_arrays(folder: Folder, step: int | None = None) -> dict[str, ArrayInfo]:
    """Returns {name: (shape, dtype, bytes)} of everything in a checkpoint, loading nothing.

    Args:
      folder: a run directory, its checkpoints folder, or the folder of one step.
      step: which step; None means the newest.

    Raises:
      UserError: if there is no such checkpoint.
    """
    return steps.read_manifest(folder, step)[1]['arrays']


def read_metadata(folder: Folder, step: int | None = None) -> dict[str, Any]:
    """Returns what was saved beside the arrays of a checkpoint, with `step` and `versions`; see `list_arrays`."""
    record = steps.read_manifest(folder, step)[1]
    return {**record['metadata'], 'step': record['step'], 'versions': record['versions']}


def restore_params(
    folder: Folder,
    step: int | None = None,
    shardings: Any = None,
    allow_missing: Iterable[str] = (),
    *,
    abstract: Any = None,
    ema: bool = False,
) -> dict[str, Any]:
    """Returns the parameters of a checkpoint as nested dicts, by default as numpy arrays on the host.

    Args:
      folder: a run directory, its checkpoints folder, or the folder of one step.
      step: which step; None means the newest intact one (a damaged one is skipped with a warning).
      shardings: one sharding for all, or a tree of them like the parameters; None means host arrays.
      allow_missing: regular expressions for whole names; parameters of `abstract` which they match may be missing from
        the checkpoint, are logged, and are left out of the result.
      abstract: tree of ShapeDtypeStruct which the parameters must equal; None takes what is there.
      ema: whether to read the moving average of the parameters.

    Raises:
      UserError: if there is no such checkpoint, it is damaged, it holds no moving average, or anything is missing,
        unexpected, misshaped or of another dtype; every difference is listed.
    """
    optional = _compile(allow_missing)
    if optional and abstract is None:
        raise UserError('allow_missing needs abstract, the parameters which are wanted')
    source, record, root = _open(folder, step, ema)
    saved = _below(record['arrays'], root)
    if abstract is not None:
        wanted = names.describe(names.named_leaves(abstract))
        left = [name for name in wanted if name not in saved and _matches(name, optional)]
        found = names.differences(saved, {name: info for name, info in wanted.items() if name not in left})
        if found:
            raise UserError(f'the parameters in {source} do not fit: {"; ".join(found)}')
        if left:
            _log.warning('not in %s, left out: %s', source, ', '.join(left))
    return names.nest(_read(source, saved, root, _shardings_by_name(shardings, saved)))


def restore_partial(
    folder: Folder, params: Any, patterns: Iterable[str], step: int | None = None, *, ema: bool = False
) -> Partial:
    """Replaces the parameters whose whole names match one of `patterns` by those of a checkpoint.

    Args:
      folder, step, ema: as in `restore_params`.
      params: tree of arrays; a device array is replaced by one in the same sharding.
      patterns: regular expressions such as `encoder/.*`.

    Raises:
      UserError: if a pattern matches no parameter, or a matching one is missing from the checkpoint, misshaped or of
        another dtype.
    """
    leaves = names.named_leaves(params)
    compiled = _compile(patterns)
    for pattern in compiled:
        if not any(pattern.fullmatch(name) for name in leaves):
            raise UserError(f"no parameter's whole name matches '{pattern.pattern}'; there are {', '.join(leaves)}")
    wanted = {name: info for name, info in names.describe(leaves).items() if _matches(name, compiled)}
    source, record, root = _open(folder, step, ema)
    saved = _below(record['arrays'], root)
    found = names.differences({name: info for name, info in saved.items() if name in wanted}, wanted)
    if found:
        raise UserError(f'the parameters asked for from {source} do not fit: {"; ".join(found)}')
    shardings = {name: leaves[name].sharding for name in wanted if isinstance(leaves[name], jax.Array)}
    leaves.update(_read(source, wanted, root, shardings))
    return Partial(
        jax.tree.unflatten(jax.tree.structure(params), list(leaves.values())),
        taken=list(wanted),
        kept=[name for name in leaves if name not in wanted],
        unused=[name for name in saved if name not in wanted],
    )


def average_params(folder: Folder, n: int, step: int | None = None, *, ema: bool = False) -> dict[str, Any]:
    """Returns the mean of the parameters of the last `n` checkpoints, summed in float64 (the 2017 paper, section 6.1).

    Args:
      folder, ema: as in `restore_params`.
      n: how many; all must be intact.
      step: the newest to take; None means the newest of all.

    Raises:
      UserError: if there are fewer than `n`, one is damaged, or their parameters differ in name, shape or dtype.
    """
    directory, last = steps.locate(folder, step)
    chosen = [candidate for candidate in steps.finished(directory) if candidate <= last][-n:] if n > 0 else []
    if not chosen or len(chosen) < n:
        raise UserError(f'cannot average {n} checkpoints of {directory}: there are {len(chosen)} up to step {last}')
    total: dict[str, np.ndarray] = {}
    infos: dict[str, ArrayInfo] = {}
    for candidate in chosen:
        source, record, root = _open(directory, candidate, ema)
        saved = _below(record['arrays'], root)
        found = names.differences(saved, infos) if infos else []
        if found:
            raise UserError(f'checkpoints {chosen} in {directory} cannot be averaged: {"; ".join(found)}')
        infos = saved
        for name, array in _read(source, saved, root, {}).items():
            total[name] = total.get(name, 0) + array.astype(np.float64)
    return names.nest({name: (array / n).astype(jnp.dtype(infos[name].dtype)) for name, array in total.items()})


def _open(folder: Folder, step: int | None, ema: bool) -> tuple[epath.Path, dict[str, Any], str]:
    """Returns (folder of a step, manifest, 'params/' or 'ema/'), the files of those parameters verified."""
    root = 'ema/' if ema else 'params/'
    directory, newest = steps.locate(folder, step)
    # A step which the caller names is the only candidate; so is one whose own folder was given.
    named = step is not None or steps.absolute(folder).parent == directory
    candidates = [newest] if named else steps.finished(directory)[::-1]
    reasons = []
    for candidate in candidates:
        source = directory / str(candidate)
        try:
            record = manifest.read(source)
            wanted = [name for name in record['arrays'] if name.startswith(root)]
            manifest.verify(source, manifest.files_for(record, wanted))
        except manifest.Damaged as damage:
            reasons.append(f'checkpoint {candidate} is damaged ({damage})')
            if not named:
                _log.warning('skipping %s in %s', reasons[-1], directory)
            continue
        if not wanted:
            raise UserError(f'{source} holds no {"moving average of the parameters" if ema else "parameters"}')
        return source, record, root
    raise UserError(f'cannot restore from {directory}: {"; ".join(reasons)}')


def _below(arrays: Mapping[str, ArrayInfo], root: str) -> dict[str, ArrayInfo]:
    return {name.removeprefix(root): info for name, info in arrays.items() if name.startswith(root)}


def _read(
    source: epath.Path, infos: Mapping[str, ArrayInfo], root: str, shardings: Mapping[str, jax.sharding.Sharding]
) -> dict[str, Any]:
    targets = {
        root + name: jax.ShapeDtypeStruct(info.shape, jnp.dtype(info.dtype), sharding=shardings.get(name))
        for name, info in infos.items()
    }
    arrays = storage.read(source / manifest.ARRAYS, targets)
    return {name.removeprefix(root): array for name, array in arrays.items()}


def _shardings_by_name(shardings: Any, saved: Mapping[str, ArrayInfo]) -> dict[str, jax.sharding.Sharding]:
    if shardings is None:
        return {}
    if isinstance(shardings, jax.sharding.Sharding):
        return dict.fromkeys(saved, shardings)
    by_name = names.named_leaves(shardings)
    absent = [name for name in saved if name not in by_name]
    if absent:
        raise UserError(f'no sharding is given for {", ".join(absent)}')
    return by_name


def _compile(patterns: Iterable[str]) -> list[re.Pattern[str]]:
    if isinstance(patterns, str):
        raise UserError(f"patterns are a list of regular expressions; write ['{patterns}']")
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise UserError(f"'{pattern}' is no regular expression: {error}") from None
    return compiled


def _matches(name: str, patterns: Iterable[re.Pattern[str]]) -> bool:
    return any(pattern.fullmatch(name) for pattern in patterns)
