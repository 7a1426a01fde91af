"""Exported programs, run by a process in which neither this library nor Flax can be imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from tiny_models import model_and_params, tiny

from transformer_jax.decoding import DecodeConfig, export, generate
from transformer_jax.decoding.export import export_model
from transformer_jax.errors import UserError
from transformer_jax.quantization import quantize

CONFIGS = {
    'decoder': tiny(kind='decoder', position='rope', num_kv_heads=2, param_dtype='bfloat16'),
    'encoder_decoder': tiny(),
}
BLOCK = """
import importlib.abc
import sys


class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('transformer_jax', 'flax', 'orbax', 'optax'):
            raise ImportError(f'{name} is blocked')


sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.parametrize('kind, weights', [('decoder', 'none'), ('encoder_decoder', 'int4')])
def test_the_documented_example_generates_what_generate_does(tmp_path, kind, weights):
    """The example of the docstring as it stands, in a process which has JAX alone."""
    model, params = quantize(*model_and_params(CONFIGS[kind]), weights, cache='int8', group=4)
    source_length = 8 if kind == 'encoder_decoder' else None
    prompt_length = 1 if source_length else 8
    export_model(
        tmp_path / 'out', model, params, batch=2, prompt_length=prompt_length, capacity=16, source_length=source_length
    )
    example = re.search(r'```python\n(.*?)```', export.__doc__, re.DOTALL)[1]
    prompt = [5, 7, 2, 9, 4]
    arguments = [str(tmp_path / 'out'), ','.join(map(str, prompt)), '7']
    done = subprocess.run(
        [sys.executable, '-c', BLOCK + example, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    want = generate(model, params, [prompt], config=DecodeConfig(max_new_tokens=7, eos_ids=()))
    assert [int(line) for line in done.stdout.split()] == want.tokens[0, 0].tolist()
    shapes = json.loads((tmp_path / 'out' / 'shapes.json').read_text())
    assert shapes['prefill'][0] == {'name': 'tokens', 'shape': [2, prompt_length], 'dtype': 'int32'}
    assert 'overflow' in [entry['name'] for entry in shapes['cache']]
    stored = np.load(tmp_path / 'out' / 'params.npz')
    assert {entry['name']: entry['shape'] for entry in shapes['params']} == {
        name: list(leaf.shape) for name, leaf in stored.items()
    }
    # int4 is two to a byte on disk too.
    assert (
        weights == 'none'
        or stored['embedding/embedding/values'].size == params['embedding']['embedding'].values.size / 2
    )


@pytest.mark.parametrize(
    'kind, choices, words',
    [
        ('decoder', dict(capacity=4), 'capacity = 4 is less than prompt_length = 8'),
        ('decoder', dict(capacity=65), '65 positions are asked for; the model has 64'),
        ('decoder', dict(batch=0), 'batch = 0'),
        ('decoder', dict(source_length=8), "kind 'decoder' takes no source_length"),
        ('encoder_decoder', {}, "kind 'encoder_decoder' needs a source_length"),
        ('decoder', dict(platforms=('gpu', 'cudu')), "platform = 'gpu' is unknown"),
    ],
)
def test_shapes_which_do_not_fit_are_refused_in_words(tmp_path, kind, choices, words):
    model, params = model_and_params(CONFIGS[kind])
    with pytest.raises(UserError) as caught:
        export_model(tmp_path, model, params, **dict(batch=2, prompt_length=8, capacity=16) | choices)
    assert words in str(caught.value)
    (tmp_path / 'file').touch()
    with pytest.raises(UserError, match='is not empty'):
        export_model(tmp_path, model, params, batch=2, prompt_length=8, capacity=16)
