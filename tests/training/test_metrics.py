"""Numbers are read late, written once, and counted right."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_training import Toy, batch

from transformer_jax.training import metrics
from transformer_jax.training.flops import matrix_product_flops, training_flops


def test_numbers_of_the_step_just_dispatched_are_never_read(monkeypatch):
    read, real = [], jax.device_get
    monkeypatch.setattr(jax, 'device_get', lambda tree: read.append(float(tree['loss'])) or real(tree))
    lagged = metrics.Lagged()
    for step in range(1, 5):
        earlier = lagged.push(step, {'loss': jnp.asarray(step * 10.0)})
        assert read == [10.0 * n for n in range(1, step)]
        assert earlier is None if step == 1 else earlier == (step - 1, {'loss': 10.0 * (step - 1)})
    assert lagged.flush() == (4, {'loss': 40.0}) and lagged.flush() is None


def test_the_loss_of_a_window_is_the_mean_over_tokens_and_leaves_skipped_steps_out():
    window = metrics.Window()
    for loss, weight, in_row in ((2.0, 3.0, 0), (float('nan'), 5.0, 1), (6.0, 1.0, 0)):
        window.add({'loss': loss, 'weight': weight, 'skipped_in_row': in_row, 'flops': 1.0, 'rate': 0.1,
                    'gradient_norm': 1.0, 'skipped': 1})  # fmt: skip
    assert window.summary()['loss'] == 3.0


def test_lines_after_the_checkpoint_are_written_again_and_not_twice(tmp_path):
    writer = metrics.MetricsWriter(tmp_path)
    for step in range(1, 6):
        writer.write(step, {'loss': step}, 'train')
    writer.close()
    with (tmp_path / 'metrics.jsonl').open('a') as file:
        file.write('{"step": 6, "train/lo')  # cut short by a kill
    writer = metrics.MetricsWriter(tmp_path, start_step=3)
    writer.write(4, {'loss': float('nan')}, 'train')
    writer.close()
    lines = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]['train/loss'] is None
    assert list((tmp_path / 'tensorboard').glob('events*'))


def test_a_damaged_line_is_left_out_with_its_number_and_costs_no_other(tmp_path, caplog):
    lines = [json.dumps({'step': step, 'train/loss': 1.0 / step}).encode() for step in range(1, 6)]
    lines[1], lines[3] = b'\xff' + lines[1][1:], lines[3].replace(b'step', b'stfp')
    (tmp_path / 'metrics.jsonl').write_bytes(b'\n'.join(lines))
    assert [line['step'] for line in metrics.read_lines(tmp_path / 'metrics.jsonl')] == [1, 3, 5]
    assert 'which are no numbers of a step, 2, 4' in caplog.text


def test_flops_are_those_of_the_formula_and_scans_count_every_step():
    matrix, x = jnp.ones((5, 5)), jnp.ones((3, 5))

    def scanned(x):
        return jax.lax.scan(lambda carry, _: (carry @ matrix, None), x, None, length=7)[0]

    assert matrix_product_flops(lambda x: x @ matrix, x) == 2 * 3 * 5 * 5
    assert matrix_product_flops(jax.jit(scanned), x) == 7 * 2 * 3 * 5 * 5
    model, rows = Toy(), batch()
    params = model.init(jax.random.key(0), rows['inputs']['tokens'])['params']
    matrices = params['hidden']['kernel'].size + params['output']['kernel'].size
    assert training_flops(model, params, rows['inputs']) == 6 * np.size(rows['labels']) * matrices


def test_flops_of_an_attention_model_do_not_depend_on_the_number_of_heads():
    from transformer_jax.config import ModelConfig
    from transformer_jax.models import abstract_params, build

    counts = set()
    for heads in (1, 2, 8):
        model = build(ModelConfig(vocab_size=32, d_model=16, d_ff=32, num_layers=2, num_heads=heads))
        tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
        inputs = {'source_tokens': tokens, 'target_tokens': tokens}
        counts.add(training_flops(model, abstract_params(model)[0], inputs))
    projections = 2 * 2 * (4 + 8) * 16 * 16 + 2 * 2 * 2 * 2 * 16 * 32
    scores = 2 * 3 * 2 * 2 * 8 * 16  # L x (self, self, cross) x (QK, PV) x 2 S D a token
    logits = 2 * 16 * 32
    assert counts == {3 * 16 * (projections + scores + logits)}


@pytest.mark.parametrize('module', ['transformer_jax.training.loop', 'transformer_jax.analysis.curves'])
def test_matplotlib_is_not_loaded_before_a_picture_is_drawn(module):
    import subprocess
    import sys
    from pathlib import Path

    code = f'import sys, {module}; sys.exit("matplotlib" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], cwd=Path(__file__).parents[2]).returncode == 0
