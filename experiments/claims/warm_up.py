"""Does post-norm need warm-up, and pre-norm not? (Xiong et al. 2020, section 3)"""

from __future__ import annotations

from experiments.claims.finding import Finding, verdict
from experiments.claims.trained import STEPS, mean, results
from transformer_jax.analysis.lines import Line, Panel, draw_panels
from transformer_jax.sweeps import axis, product

LAYERS, PLACES, WARM_UPS, RATES = 4, ('post', 'pre'), (0, 100), (1e-3, 3e-3, 1e-2)
HARM = 0.1  # nats a token by which a loss counts as worse


def measure(figure: str) -> Finding:
    """Trains each placement with and without warm-up at three peak learning rates."""
    points = product(
        axis('model.norm_position', PLACES),
        axis('optimizer.warmup_steps', WARM_UPS),
        axis('optimizer.learning_rate', RATES),
    )
    changes = {'model.num_layers': LAYERS}
    losses = [mean(found) for found in results(points, seeds=(0,), changes=changes).values()]
    loss = {
        (place, warm_up): losses[(i * len(WARM_UPS) + j) * len(RATES) :][: len(RATES)]
        for i, place in enumerate(PLACES)
        for j, warm_up in enumerate(WARM_UPS)
    }
    lines = [Line(f'{place}, {warm_up} steps of warm-up', RATES, values) for (place, warm_up), values in loss.items()]
    title = f'Warm-up: {LAYERS} + {LAYERS} layers after {STEPS} steps'
    draw_panels(title, [Panel('peak learning rate', 'validation loss [nats a token]', lines, 'log x')], figure)
    gain = {
        place: [cold - warm for cold, warm in zip(loss[place, 0], loss[place, WARM_UPS[1]], strict=True)]
        for place in PLACES
    }
    told = '; '.join(
        f'{place}-norm {", ".join(f"{value:+.2f}" for value in values)}' for place, values in gain.items()
    )
    return Finding(
        'Post-norm needs warm-up, pre-norm does not.',
        f'Without warm-up the loss is higher by (nats a token, at rates {", ".join(f"{rate:g}" for rate in RATES)}): '
        f'{told}. The best losses are {min(loss["post", 0]):.2f} and {min(loss["post", WARM_UPS[1]]):.2f} for '
        f'post-norm without and with it, {min(loss["pre", 0]):.2f} and {min(loss["pre", WARM_UPS[1]]):.2f} for '
        f'pre-norm. One seed; {HARM} nats count as worse.',
        verdict(max(gain['post']) > HARM, max(gain['pre']) < HARM),
    )
