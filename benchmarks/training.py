"""Training throughput beside Hugging Face Marian and torch's nn.Transformer: forward, backward, Adam.

Run from the repository root, with the extra `parity` installed and nothing else running:
    python -m benchmarks.training --rounds=8 --output=training.json
A contestant runs in the group's precision and dropout, or, written marian:fp32, in those of another group.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from benchmarks import protocol
from benchmarks.shapes import Shapes

PEERS = ('ours', 'marian', 'torch')
GROUPS = {
    'fp32': ('float32', 0.0),
    'fp32 dropout 0.1': ('float32', 0.1),
    'bf16': ('bfloat16', 0.0),
}


def main() -> None:
    """Runs the referee, or with --peer one worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--groups', nargs='+', choices=GROUPS, default=list(GROUPS))
    parser.add_argument('--peers', nargs='+', default=list(PEERS), help='ours, marian, torch; or marian:fp32 and so on')
    parser.add_argument('--rounds', type=int, default=8, help='clean rounds wanted in each group')
    parser.add_argument('--steps', type=int, default=3, help='steps of each in a round; their median counts')
    parser.add_argument('--layers', type=int, default=Shapes.num_layers, help='layers of each of the two stacks')
    parser.add_argument('--warm-up', type=int, default=2, help='steps of each contestant before the first round')
    parser.add_argument('--layer-stack', choices=('scan', 'unrolled'), default='scan', help='of our contestant')
    parser.add_argument('--compile-torch', action='store_true', help='torch.compile for the torch contestants')
    parser.add_argument('--output', type=Path, help='also write everything here, as JSON')
    parser.add_argument('--peer', help=argparse.SUPPRESS)
    parser.add_argument('--group', choices=GROUPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for peer in arguments.peers:
        name, _, group = peer.partition(':')
        if name not in PEERS or group not in ('', *GROUPS):
            parser.error(f"--peers: '{peer}' is unknown; names are {', '.join(PEERS)}, groups {', '.join(GROUPS)}")
    if arguments.peer:
        work(arguments)
    else:
        referee(arguments)


def work(arguments: argparse.Namespace) -> None:
    """One contestant."""
    name, _, group = arguments.peer.partition(':')
    precision, dropout = GROUPS[group or arguments.group]
    shapes = Shapes(num_layers=arguments.layers)
    # Each contestant imports only its own framework.
    if name == 'ours':
        from benchmarks.ours import make_step
        from transformer_jax.training.host_cpu import tune_host_cpu

        tune_host_cpu()  # as the programs of experiments/ do

        run_step, facts = make_step(precision, dropout, shapes, arguments.layer_stack)
    else:
        from benchmarks.peers_torch import make_step

        run_step, facts = make_step(name, precision, dropout, shapes, arguments.compile_torch)
    protocol.serve(run_step, facts, arguments.warm_up)


def referee(arguments: argparse.Namespace) -> None:
    """Races each group and prints its table."""
    shapes = Shapes(num_layers=arguments.layers)
    results = {'machine': protocol.machine(), 'shapes': vars(shapes), 'layer_stack': arguments.layer_stack}
    results['torch_compiled'] = arguments.compile_torch
    print(protocol.machine_line())
    print(f'{shapes.tokens_per_step} tokens a step (source and target), {shapes.num_layers}+{shapes.num_layers} layers')
    for group in arguments.groups:
        options = [f'--group={group}', f'--layers={arguments.layers}', f'--warm-up={arguments.warm_up}']
        options.append(f'--layer-stack={arguments.layer_stack}')
        options += ['--compile-torch'] if arguments.compile_torch else []
        race = 'benchmarks.training', arguments.peers, options, arguments.rounds, arguments.steps
        result, facts = protocol.hold(*race)
        results[group] = result | {'facts': facts}
        print(format_table(group, result, facts, shapes.tokens_per_step), flush=True)
    versions = {name: fact['versions'] for name, fact in facts.items()}
    print('versions:', json.dumps(versions))
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + '\n')


def format_table(group: str, result: dict, facts: dict, tokens_per_step: int) -> str:
    """Returns tokens/s by medians, and ours over each other contestant as the median of the rounds' own ratios."""
    rows = result['workers']
    lines = [f'\n{group} ({protocol.note(result)})', '| contestant | parameters | s/step | tokens/s | ours / it |']
    lines.append('|---' * 5 + '|')
    for name, row in rows.items():
        seconds = statistics.median(row['seconds'])
        cells = [name, f'{facts[name]["parameters"]:,}', f'{seconds:.3f}', f'{tokens_per_step / seconds:,.0f}']
        if 'ours' in rows:
            pairs = zip(row['seconds'], rows['ours']['seconds'], strict=True)
            cells.append(f'{statistics.median(theirs / own for theirs, own in pairs):.2f}')
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


if __name__ == '__main__':
    main()
