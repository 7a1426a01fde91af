"""A user's program as a type checker sees it: mypy checks this file, nothing runs it."""

from __future__ import annotations

from typing import Any, assert_type

import flax.linen as nn
import numpy as np

import transformer_jax
from transformer_jax.checkpoints import ArrayInfo, Partial, StepSummary, list_arrays, list_steps, restore_partial
from transformer_jax.data.tokenizers import Tokenizer
from transformer_jax.decoding.generate import Generation

config = transformer_jax.ModelConfig(d_model=64, num_heads=4)
assert_type(config.replace(norm_position='pre'), transformer_jax.ModelConfig)
assert_type(transformer_jax.preset('transformer_base'), transformer_jax.ModelConfig)
assert_type(transformer_jax.build(config), nn.Module)

model, params = transformer_jax.restore('runs/default', step=3)
assert_type(model, nn.Module)
assert_type(transformer_jax.load_tokenizer('runs/default'), Tokenizer)
search = transformer_jax.DecodeConfig(beam_size=4)
answers = transformer_jax.generate(model, params, np.ones((1, 3), np.int32), config=search)
assert_type(answers, Generation)
assert_type(answers.log_probs, np.ndarray | None)

assert_type(list_steps('runs/default'), list[StepSummary])
assert_type(list_arrays('runs/default', 3), dict[str, ArrayInfo])
assert_type(restore_partial('runs/default', params, ['encoder/.*']), Partial)
loaded: tuple[nn.Module, Any] = transformer_jax.load_pretrained('folder')
transformer_jax.save_pretrained('export', *loaded)

width = config.d_modle  # type: ignore[attr-defined]
transformer_jax.generate(model)  # type: ignore[call-arg]
