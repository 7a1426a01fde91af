"""Which steps lie in a checkpoint directory, and how a step goes away."""

from __future__ import annotations

import os
from typing import Any

from etils import epath

from transformer_jax.checkpoints import manifest
from transformer_jax.errors import UserError

_DAMAGED = '.damaged'


def absolute(path: str | os.PathLike[str]) -> epath.Path:
    """Returns the path with `~` resolved, absolute (orbax asks for that); gs:// and the like stay as they are."""
    name = os.fspath(path)
    return epath.Path(name if '://' in name else os.path.abspath(os.path.expanduser(name)))


def _all(directory: epath.Path) -> list[tuple[int, bool]]:
    if not directory.exists():
        return []
    found = [child for child in directory.iterdir() if child.name.isdecimal() and child.is_dir()]
    return sorted((int(child.name), (child / manifest.MANIFEST).exists()) for child in found)


def finished(directory: epath.Path) -> list[int]:
    """Returns the steps which have a manifest, oldest first."""
    return [step for step, is_finished in _all(directory) if is_finished]


def unfinished(directory: epath.Path) -> list[int]:
    """Returns the steps whose save was cut off, oldest first."""
    return [step for step, is_finished in _all(directory) if not is_finished]


def remove(folder: epath.Path) -> None:
    """Deletes a step: its manifest first, so that a kill in between leaves an unfinished step, never a damaged one."""
    (folder / manifest.MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        folder.rmtree()


def set_aside(folder: epath.Path) -> None:
    """Renames a damaged step to `<step>.damaged`, so that it counts no more but can still be looked at."""
    aside = folder.parent / f'{folder.name}{_DAMAGED}'
    if aside.exists():
        aside.rmtree()
    folder.rename(aside)


def names(directory: epath.Path) -> list[tuple[int, str]]:
    """Returns (step, name of its folder) of every step, those set aside as damaged too, oldest first."""
    found = [child.name for child in directory.iterdir() if child.name.removesuffix(_DAMAGED).isdecimal()]
    return sorted((int(name.removesuffix(_DAMAGED)), name) for name in found)


def directory_of(folder: str | os.PathLike[str]) -> tuple[epath.Path, int | None]:
    """Returns (checkpoint directory, step if `folder` is that of one step) of a run, its checkpoints or one step.

    Raises:
      UserError: if the path does not exist.
    """
    path = absolute(folder)
    if not path.exists():
        raise UserError(f'{path} does not exist; give a run directory or its checkpoints folder')
    if path.name.isdecimal() and (path / manifest.ARRAYS).is_dir():
        return path.parent, int(path.name)
    if (path / 'checkpoints').is_dir():
        path = path / 'checkpoints'
    return path, None


def locate(folder: str | os.PathLike[str], step: int | None = None) -> tuple[epath.Path, int]:
    """Returns (checkpoint directory, step) from a run directory, a checkpoint directory or the folder of one step.

    Args:
      folder: `run`, `run/checkpoints` or `run/checkpoints/<step>`.
      step: which one; None means the newest finished.

    Raises:
      UserError: if the path, the checkpoints or the step do not exist; it lists the steps which do.
    """
    path, own = directory_of(folder)
    if own is not None:
        if step not in (None, own):
            raise UserError(f'{path / str(own)} is the folder of step {own}, but step {step} was asked for')
        step = own
    present = finished(path)
    if not present:
        raise UserError(f'there is no finished checkpoint in {path}')
    if step is not None and step not in present:
        raise UserError(f'there is no checkpoint {step} in {path}; there are {", ".join(map(str, present))}')
    return path, present[-1] if step is None else step


def read_manifest(folder: str | os.PathLike[str], step: int | None = None) -> tuple[epath.Path, dict[str, Any]]:
    """Returns (folder of the step, its manifest); see `locate`.

    Raises:
      UserError: as `locate`, or if the manifest is damaged.
    """
    directory, found = locate(folder, step)
    try:
        return directory / str(found), manifest.read(directory / str(found))
    except manifest.Damaged as damage:
        raise UserError(f'checkpoint {found} in {directory} is damaged: {damage}') from None
