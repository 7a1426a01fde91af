"""What lies in a checkpoint directory, told without loading an array."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from etils import epath

from transformer_jax.checkpoints import manifest, steps
from transformer_jax.errors import UserError

WHOLE, INTACT, DAMAGED, UNFINISHED, SET_ASIDE = 'whole', 'intact', 'damaged', 'unfinished', 'set aside'


class StepSummary(NamedTuple):
    """One step of a checkpoint directory.

    `state` is 'whole' (every file is there with its size), 'intact' (its checksums hold too), 'damaged' (for `reason`),
    'unfinished' (its save was cut off, or still goes on) or 'set aside' (found damaged by an earlier start). `saved_at`
    is the time of its manifest in seconds since 1970, `bytes` the size of its files; both are None without a manifest.
    """

    step: int
    state: str
    reason: str
    saved_at: float | None
    bytes: int | None
    metrics: dict[str, Any]


def list_steps(folder: str | os.PathLike[str], step: int | None = None, *, verify: bool = False) -> list[StepSummary]:
    """Returns the steps in a run directory or checkpoints folder, oldest first; nothing is loaded or changed.

    Args:
      folder: a run directory, its checkpoints folder, or the folder of one step.
      step: list this one alone; None lists all, or the one whose folder was given.
      verify: whether to compare every file with its checksum, which reads them all.

    Raises:
      UserError: if the path does not exist or holds no checkpoint, or not this step.
    """
    directory, only = steps.directory_of(folder)
    present = steps.names(directory)
    if not present:
        raise UserError(f'there is no checkpoint in {directory}; give a run directory or its checkpoints folder')
    step = only if step is None else step
    chosen = [(number, name) for number, name in present if step in (None, number)]
    if not chosen:
        raise UserError(f'there is no checkpoint {step} in {directory}; there are {", ".join(n for _, n in present)}')
    return [_summary(directory / name, number, verify) for number, name in chosen]


def _summary(folder: epath.Path, step: int, verify: bool) -> StepSummary:
    if not folder.name.isdecimal():
        return StepSummary(step, SET_ASIDE, f'lies in {folder.name}', None, None, {})
    if not (folder / manifest.MANIFEST).exists():
        return StepSummary(step, UNFINISHED, '', None, None, {})
    saved_at, size, metrics = (folder / manifest.MANIFEST).stat().mtime, None, {}
    try:
        record = manifest.read(folder)
        size = sum(entry[0] for entry in record['files'].values())
        metrics = record['metadata'].get('metrics', {})
        manifest.verify(folder, record['files'], contents=verify)
    except manifest.Damaged as damage:
        return StepSummary(step, DAMAGED, str(damage), saved_at, size, metrics)
    return StepSummary(step, INTACT if verify else WHOLE, '', saved_at, size, metrics)
