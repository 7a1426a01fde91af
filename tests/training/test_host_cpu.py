"""Freed memory is kept and less is copied, and only where it should be so."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_jax.training import host_cpu

ROOT = Path(__file__).parents[2]

FAULTS = """
import resource, sys
from transformer_jax.training.host_cpu import keep_freed_memory
if sys.argv[1] == 'kept' and not keep_freed_memory():
    raise SystemExit('no glibc')
def faults(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        bytearray(64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(2)
print(faults(4))
"""

STEP = """
import sys
if sys.argv[1] == 'tuned':
    from transformer_jax.training.host_cpu import tune_host_cpu
    assert tune_host_cpu()
import numpy as np
import jax
from benchmarks import ours
from benchmarks.shapes import Shapes, make_batches
shapes = Shapes(num_layers=1, d_model=64, d_ff=128, vocab_size=100, num_heads=2)
step, make_state = ours.make_training(ours.make_config(shapes, 'float32', 0.0, 'unrolled'), 1e-3)
state, batch = make_state(jax.random.key(0)), ours.to_training_batch(make_batches(shapes)[0])
compiled = step.lower(state, batch).compile()
state = compiled(state, batch)[0]
total = sum(float(np.abs(x).sum()) for x in jax.tree.leaves((state.params, state.opt_state)))
print(compiled.as_text().count(' copy('), compiled.memory_analysis().temp_size_in_bytes, total)
"""


def run(code, how):
    return subprocess.run([sys.executable, '-c', code, how], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='glibc')
def test_memory_taken_again_is_not_mapped_again():
    counts = {}
    for how in ('kept', 'given back'):
        done = run(FAULTS, how)
        if 'no glibc' in done.stderr:
            pytest.skip('another C library')
        counts[how] = int(done.stdout)
    assert counts['given back'] >= 4 * (64 << 20) // (1 << 21) > 10 * counts['kept']


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is not None, reason='not tuned where libtpu is')
def test_a_step_copies_less_and_computes_the_same():
    plain, tuned = ([float(number) for number in run(STEP, how).stdout.split()] for how in ('plain', 'tuned'))
    assert tuned[0] < 0.7 * plain[0] and tuned[1] < plain[1] and tuned[2] == pytest.approx(plain[2], rel=1e-6)


def test_nothing_is_changed_where_jax_has_accelerators(monkeypatch):
    monkeypatch.setattr(host_cpu.ctypes, 'CDLL', lambda name: pytest.fail('asked for the C library'))
    monkeypatch.setattr(importlib.metadata, 'entry_points', lambda group: ['a plugin'])
    assert host_cpu.tune_host_cpu() is False


def test_flags_which_the_user_gives_stay(monkeypatch):
    monkeypatch.setattr(host_cpu, 'keep_freed_memory', lambda: True)
    monkeypatch.setattr(importlib.metadata, 'entry_points', lambda group: [])
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    for given, kept in (('--xla_a=1', r'--xla_a=1 --xla_backend\S+'), ('--xla_backend_extra_options=b', r'\S+=b')):
        monkeypatch.setenv('XLA_FLAGS', given)
        assert host_cpu.tune_host_cpu() and re.fullmatch(kept, host_cpu.os.environ['XLA_FLAGS'])
