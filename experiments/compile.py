"""Compiles a run's programs for TPUs which are not there, and prints what they hold, compute and communicate.

    python -m experiments.compile --config=FILE --topology=v5e:16x16 [--programs=train,prefill,decode]
    python -m experiments.compile --config=FILE --topology=v5p:4x4x4 --mesh_sweep

Needs the extra `tpu`, and no data: neither a TPU nor the training set is looked at.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if not __package__:  # run as a file: the project's directory, not experiments/, belongs on the path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import jax
from absl import flags

from experiments import common
from transformer_jax.analysis.ahead_of_time import PROGRAMS, Plan, mesh_shapes, sweep
from transformer_jax.analysis.chips import parse_topology
from transformer_jax.analysis.report import full_text, mesh_text, table
from transformer_jax.errors import UserError

flags.DEFINE_string('topology', None, "chips and their grid, such as 'v5e:16x16', 'v5p:4x4x4' or 'v6e:8x8'")
flags.DEFINE_list('programs', list(PROGRAMS), 'what to compile')
flags.DEFINE_bool('mesh_sweep', False, 'compile the train step for every mesh of data, fsdp and tensor; print a table')
flags.DEFINE_list('compiler_options', [], "options of XLA beyond those of a run, each 'name=value'")
flags.DEFINE_bool('json', False, 'print one JSON object a program instead of text')


def main() -> int:
    """Compiles the programs of the flags' experiment and prints their reports."""
    values, experiment = flags.FLAGS, common.experiment()
    if values.topology is None:
        raise UserError('--topology is not given; say which chips, such as --topology=v5e:16x16')
    topology = parse_topology(values.topology)
    common.show_logs(lambda line: print(line, file=sys.stderr))
    jax.config.update('jax_platforms', 'cpu')  # libtpu would look for its chips
    options = dict(option.split('=', 1) for option in values.compiler_options if '=' in option)
    if len(options) < len(values.compiler_options):
        raise UserError(f'--compiler_options = {",".join(values.compiler_options)}; write name=value,name=value')
    if values.mesh_sweep:
        shapes = list(mesh_shapes(topology.chips))
        reports = sweep(experiment, topology, shapes, options, lambda line: print(line, file=sys.stderr))
        if not reports:
            raise UserError(f'no mesh of {topology.chips} chips can train this model; the lines above say why')
        if values.json:
            print('\n'.join(json.dumps(report.to_dict()) for report in reports))
        else:
            print(f'{table(reports)}\nbest: {mesh_text(reports[0].mesh)} (times are estimates by published rates)')
        return 0
    plan = Plan(experiment, topology, options=options)
    for program in values.programs:
        report = plan.report(program)
        print(json.dumps(report.to_dict()) if values.json else f'{full_text(report)}\n', flush=True)
    return 0


if __name__ == '__main__':
    common.run(main, common.define_config)
