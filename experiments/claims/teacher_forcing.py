"""One pass over the whole target is the same function as one step a token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.finding import Finding, verdict
from transformer_jax.analysis.lines import Line, Panel, draw_panels
from transformer_jax.config import ModelConfig
from transformer_jax.decoding import init_cache, prefill, step
from transformer_jax.models import build, init_params

LENGTH = 32


def measure(figure: str) -> Finding:
    """Scores targets in one causal pass, and token by token with a cache."""
    model = build(ModelConfig(vocab_size=200, d_model=64, d_ff=128, num_layers=2, num_heads=4, layer_stack='unrolled'))
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    random = np.random.default_rng(0)
    source, target = random.integers(3, 200, (4, 20)), random.integers(3, 200, (4, LENGTH))
    whole = jax.jit(
        lambda p: jax.nn.log_softmax(model.apply({'params': p}, source_tokens=source, target_tokens=target).logits)
    )(params)
    logits, cache = prefill(model, params, jnp.asarray(target[:, :1]), init_cache(model, 4, LENGTH, source))
    steps = [logits[:, 0]]
    for t in range(1, LENGTH):
        logits, cache = step(model, params, jnp.asarray(target[:, t : t + 1]), cache)
        steps.append(logits[:, 0])
    single = jax.nn.log_softmax(jnp.stack(steps, axis=1))
    gaps = np.abs(np.asarray(whole) - np.asarray(single)).max(axis=(0, 2))
    draw_panels(
        'Two ways to score a target',
        [
            Panel(
                'target token',
                'largest difference in log-probability',
                [Line('one pass against one token at a time', range(1, LENGTH + 1), gaps)],
            )
        ],
        figure,
    )
    return Finding(
        'With teacher forcing, all target tokens are scored in one parallel pass, as if they came one at a time.',
        f'Over {LENGTH} tokens, 4 sentences and all 200 words the log-probabilities differ by at most '
        f'{gaps.max():.1e} nats.',
        verdict(gaps.max() < 1e-4),
    )
