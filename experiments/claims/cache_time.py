"""The key/value cache: time and work for one more token, with and without."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from experiments.claims.finding import Finding, verdict
from experiments.claims.timing import seconds
from transformer_jax.analysis.lines import Line, Panel, draw_panels
from transformer_jax.config import ModelConfig
from transformer_jax.decoding import init_cache, step
from transformer_jax.models import build, init_params
from transformer_jax.training.flops import matrix_product_flops

LENGTHS = (64, 128, 256, 512, 1024)


def measure(figure: str) -> Finding:
    """Takes the token after n others: by one step on a cache of them, and by reading all of them anew."""
    model = build(
        ModelConfig(
            kind='decoder',
            vocab_size=1000,
            d_model=128,
            d_ff=512,
            num_layers=4,
            num_heads=4,
            layer_stack='unrolled',
            position='rope',
        )
    )
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))

    def anew(params, tokens):
        hidden = model.apply({'params': params}, tokens).hidden[:, -1:]
        return model.apply({'params': params}, hidden, method='logits')

    def cached(params, token, cache):
        return step(model, params, token, cache)

    times, work = {'with': [], 'without': []}, {'with': [], 'without': []}
    for length in LENGTHS:
        tokens = jnp.ones((1, length), jnp.int32)
        full = init_cache(model, 1, length).replace(filled=jnp.asarray(length - 1), valid=jnp.ones((1, length), bool))
        for name, function, arguments in (('with', cached, (tokens[:, :1], full)), ('without', anew, (tokens,))):
            times[name].append(1000 * seconds(jax.jit(function), params, *arguments))
            work[name].append(matrix_product_flops(function, params, *arguments) / 1e6)
    panels = [
        Panel('tokens so far', what, [Line(f'{name} cache', LENGTHS, values[name]) for name in values], 'log')
        for what, values in (('milliseconds for one more', times), ('MFLOPs for one more', work))
    ]
    draw_panels('One more token', panels, figure)
    ratio = [slow / fast for slow, fast in zip(times['without'], times['with'], strict=True)]
    growth = {name: values[-1] / values[0] for name, values in work.items()}
    return Finding(
        'A key/value cache makes the work for a new token grow as n instead of n².',
        f'From 64 to 1,024 tokens the work for one more grows {growth["with"]:.1f} times with the cache (projections '
        f'do not grow, attention does) and {growth["without"]:.0f} times without; reading anew takes {ratio[0]:.1f} '
        f'times as long at 64 tokens and {ratio[-1]:.0f} times at 1,024 ({times["with"][-1]:.2f} ms against '
        f'{times["without"][-1]:.0f} ms).',
        verdict(growth['with'] < 16, growth['without'] > 16, ratio[-1] > ratio[0] > 1),
    )
