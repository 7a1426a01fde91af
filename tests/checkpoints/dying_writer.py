"""Saves checkpoint 1, then kills itself with SIGKILL at a chosen moment of saving checkpoint 2."""

from __future__ import annotations

import os
import resource
import signal
import sys
from pathlib import Path

import jax.numpy as jnp
from etils import epath

from transformer_jax.checkpoints import CheckpointManager, manifest, storage

MOMENTS = ('arrays', 'checksums', 'manifest', 'rename', 'pruning', 'any')


def contents(step: int) -> dict:
    return {'params': {f'w{i}': jnp.arange(step, step + 50_000, dtype=jnp.float32) + i for i in range(20)}}


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(directory: str, moment: str) -> None:
    manager = CheckpointManager(directory, keep=1 if moment == 'pruning' else 3)
    manager.save(1, contents(1), {'position': 1})
    manager.wait()
    match moment:
        case 'full disk':  # No file can grow beyond this, so that writing an array fails.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
        case 'arrays':  # While the arrays are being written.
            storage.Writer.wait = die
        case 'checksums':  # The arrays are whole, nothing else is.
            manifest._checksum = die
        case 'manifest':  # The manifest is begun.
            epath.Path(directory).__class__.write_text = lambda path, text: Path(path).write_text(text[:99]) and die()
        case 'rename':  # The manifest is whole but does not bear its name.
            epath.Path(directory).__class__.replace = die
        case 'pruning':  # Checkpoint 2 is whole, checkpoint 1 half deleted.
            epath.Path(directory).__class__.rmtree = die
    step = 2
    while True:
        print(step, flush=True)
        manager.save(step, contents(step), {'position': step})
        if moment != 'any':
            manager.wait()
        step += 1


if __name__ == '__main__':
    main(*sys.argv[1:])
