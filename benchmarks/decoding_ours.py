"""Our contestant: the library's `generate`, called as a user calls it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import flax
import jax
import numpy as np

import transformer_jax
from benchmarks.decoding_jobs import SHAPES, Job


def make_generate(job: Job, precision: str, folder: Path) -> tuple[Callable[[], np.ndarray], dict]:
    """Returns `run() -> best tokens (batch, new tokens)` and facts."""
    shape = SHAPES[job.shape]
    model, params = transformer_jax.load_pretrained(
        folder / 'huggingface', precision, layer_stack='unrolled', generation=False
    )
    # Once: parameters on the host, or scanned ones, would be copied by every call.
    params = jax.block_until_ready(jax.device_put(params))
    inputs = job.inputs()
    config = transformer_jax.DecodeConfig(
        max_new_tokens=shape.new_tokens,
        min_new_tokens=shape.new_tokens,
        beam_size=job.beams,
        length_penalty='length',
        length_penalty_alpha=1.0,
        early_stopping='heuristic',
        eos_ids=(shape.eos_id,),
        pad_id=shape.vocab_size - 1,
        decoder_start_id=shape.vocab_size - 1 if shape.source else 0,
    )

    def run() -> np.ndarray:
        return transformer_jax.generate(model, params, inputs, config=config).tokens[:, 0]

    return run, {'versions': {'jax': jax.__version__, 'flax': flax.__version__}}
