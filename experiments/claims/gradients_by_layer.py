"""Gradients at initialisation by layer and norm placement (Xiong et al. 2020, section 3.3 and figure 3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.finding import Finding, verdict
from transformer_jax.analysis.lines import Line, Panel, draw_panels
from transformer_jax.config import ModelConfig
from transformer_jax.models import build, init_params
from transformer_jax.training.loss import cross_entropy

PLACEMENTS = ('post', 'pre', 'sandwich', 'res_post', 'deepnorm')
DEPTHS = (6, 12, 24)


def measure(figure: str) -> Finding:
    """Takes the gradient of one batch in models of 6, 12 and 24 layers which nobody has trained."""
    norms = {
        name: {L: _norms(name, L) for L in (DEPTHS if name in ('post', 'pre') else DEPTHS[1:2])} for name in PLACEMENTS
    }
    by_layer = [Line(name, range(1, 13), norms[name][12]) for name in PLACEMENTS]
    last = [Line(name, DEPTHS, [norms[name][L][-1] for L in DEPTHS]) for name in ('post', 'pre')]
    draw_panels(
        'Gradient norm of the second feed-forward matrix before training',
        [
            Panel('layer of 12', 'gradient norm', by_layer, 'log y'),
            Panel('layers of the model', 'gradient norm in the last layer', last, 'log'),
        ],
        figure,
    )
    growth = {name: norms[name][12][-1] / norms[name][12][0] for name in ('post', 'pre')}
    depth = {name: norms[name][24][-1] / norms[name][6][-1] for name in ('post', 'pre')}
    return Finding(
        'Post-norm has large gradients near the output before training, of a size that depth does not change; those of '
        'pre-norm fall as 1 / sqrt(L). So post-norm needs warm-up.',
        f'In 12 layers the last layer has {growth["post"]:.1f} times the gradient of the first under post-norm, '
        f"{growth['pre']:.2f} times under pre-norm. From 6 to 24 layers the last layer's gradient changes by a factor "
        f'{depth["post"]:.2f} under post-norm and {depth["pre"]:.2f} under pre-norm (1 / sqrt(L) would give 0.50).',
        verdict(growth['post'] > 2 * growth['pre'], 0.7 < depth['post'] < 1.4, 0.35 < depth['pre'] < 0.7),
    )


def _norms(placement: str, layers: int) -> list[float]:
    """Returns the gradient norm of each layer's second feed-forward matrix."""
    model = build(
        ModelConfig(
            kind='decoder',
            vocab_size=512,
            d_model=64,
            d_ff=256,
            num_layers=layers,
            num_heads=4,
            norm_position=placement,
            dropout=0.0,
            tie_embeddings='none',
        )
    )
    tokens = np.random.default_rng(0).integers(1, 512, (8, 33))

    @jax.jit
    def gradient(key):
        def loss(params):
            logits = model.apply({'params': params}, tokens[:, :-1]).logits
            total, weight = cross_entropy(logits, tokens[:, 1:], jnp.ones((8, 32)))
            return total / weight

        blocks = jax.grad(loss)(init_params(model, key))['decoder']['layers']['block_0']
        return jnp.sqrt(jnp.sum(blocks['ffn']['down']['kernel'] ** 2, axis=(1, 2)))

    return [float(norm) for norm in gradient(jax.random.key(0))]
