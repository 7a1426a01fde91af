"""One writer for one checkpoint directory: two runs in one place would delete each other's work."""

from __future__ import annotations

import fcntl
import os
import socket

from transformer_jax.errors import UserError

_held: dict[str, tuple[int, int]] = {}


def acquire(directory: os.PathLike[str]) -> None:
    """Takes the directory for this process until `release` or the process's end, a kill included.

    A process may take it several times. Record locks are used since a forked child does not inherit them, so a worker
    which outlives its killed parent does not keep the directory. File systems without locks (gs://) are not guarded.

    Raises:
      UserError: if another process writes there, naming it.
    """
    name = os.fspath(directory)
    if '://' in name:
        return
    if name in _held:
        descriptor, count = _held[name]
        _held[name] = descriptor, count + 1
        return
    descriptor = os.open(os.path.join(name, '.lock'), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(descriptor, 200, 0).decode(errors='replace').strip()
        os.close(descriptor)
        raise UserError(
            f'{directory} is being written by another run ({owner or "unknown"}); stop it or choose another directory'
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f'process {os.getpid()} on {socket.gethostname()}'.encode(), 0)
    _held[name] = descriptor, 1


def release(directory: os.PathLike[str]) -> None:
    """Gives back what one `acquire` took."""
    name = os.fspath(directory)
    if name not in _held:
        return
    descriptor, count = _held[name]
    if count > 1:
        _held[name] = descriptor, count - 1
        return
    os.close(descriptor)
    del _held[name]
