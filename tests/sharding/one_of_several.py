"""One process of a tiny run of one or several: notes the rows it reads, trains, and may kill itself on the way."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import jax

jax.config.update('jax_disable_most_optimizations', True)


def main(folder: str, name: str, index: str, count: str, port: str, die_at: str) -> None:
    from transformer_jax.sharding import MeshConfig, distributed, make_mesh, row_share
    from transformer_jax.training.config import Experiment
    from transformer_jax.training.loop import train
    from transformer_jax.training.setup import prepare

    if int(count) > 1:
        distributed.start(f'localhost:{port}', int(index), int(count), 120)
    experiment = Experiment.from_dict(json.loads((Path(folder) / f'{name}.json').read_text()))
    workdir = Path(folder) / name
    rows = [
        jax.tree.map(lambda x: x.tolist(), prepare(experiment, workdir).train_pipeline().batch(step)) for step in (0, 5)
    ]
    whole = row_share(make_mesh(MeshConfig(data=1, tensor=4)))
    (Path(folder) / f'{name}_{index}.rows.json').write_text(json.dumps([rows, whole]))

    def report(step, values):
        if step == int(die_at) and index == '0':
            os.kill(os.getpid(), signal.SIGKILL)

    result = train(experiment, workdir, report)
    print(json.dumps({'step': result['step'], 'devices': result['devices']}))


if __name__ == '__main__':
    main(*sys.argv[1:])
