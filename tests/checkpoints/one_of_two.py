"""One of two processes with two devices each: restores a checkpoint, saves it again elsewhere, prints what it saw."""

from __future__ import annotations

import json
import sys

import jax

jax.config.update('jax_num_cpu_devices', 2)
jax.config.update('jax_cpu_collectives_implementation', 'gloo')


def main(address: str, index: str, source: str, target: str) -> None:
    jax.distributed.initialize(address, 2, int(index), initialization_timeout=60)
    import small_state

    from transformer_jax.checkpoints import CheckpointManager

    abstract = small_state.place(small_state.make_mesh(4, 1), jax.eval_shape(small_state.make_state))
    restored = CheckpointManager(source, read_only=True).restore(abstract)
    with CheckpointManager(target, keep=1) as manager:
        for step in (8, 9):
            manager.save(step, restored.state, {'position': step})
        manager.wait()
        print(json.dumps([restored.step, list(restored.skipped), manager.steps()]))


if __name__ == '__main__':
    main(*sys.argv[1:])
