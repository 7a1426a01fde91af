"""What attention remembers of a token (DeepSeek-V2 2024, section 2.1.4 and table 1)."""

from __future__ import annotations

import jax

from experiments.claims.finding import Finding, bars, verdict
from transformer_jax.analysis.sweep_figures import draw_bars
from transformer_jax.config import ModelConfig
from transformer_jax.decoding import init_cache
from transformer_jax.models import build
from transformer_jax.presets import preset


def measure(figure: str) -> Finding:
    """Counts the numbers in a cache of the shapes of DeepSeek-V3, and in those of other attentions of its heads."""
    latent = preset('deepseek_v3')
    heads = {
        'num_heads': latent.num_heads,
        'd_k': latent.value_dim,
        'd_model': latent.d_model,
        'kind': 'decoder',
        'num_layers': 2,
        'vocab_size': 10,
    }
    found = {
        f'{latent.num_heads} heads': _numbers(ModelConfig(**heads)),
        '8 key/value heads (GQA)': _numbers(ModelConfig(**heads, num_kv_heads=8)),
        'latent (MLA)': _numbers(latent),
        '1 key/value head (MQA)': _numbers(ModelConfig(**heads, num_kv_heads=1)),
    }
    draw_bars('The cache of a model with the shapes of DeepSeek-V3', {'numbers a token and layer': bars(found)}, figure)
    own, full = found['latent (MLA)'], found[f'{latent.num_heads} heads']
    groups = own / found['1 key/value head (MQA)']
    return Finding(
        'Latent attention compresses the cache to less than that of grouped-query attention.',
        f'{own:,} numbers a token and layer against {full:,} of {latent.num_heads} full heads, 1/{full / own:.0f}; '
        f'as many as grouped-query attention with {groups:.2f} groups would keep.',
        verdict(own < found['8 key/value heads (GQA)'], abs(groups - 2.25) < 1e-9),
    )


def _numbers(config: ModelConfig) -> int:
    """Returns the numbers which one layer keeps of one token."""
    capacity = 16
    cache = jax.eval_shape(lambda: init_cache(build(config), 1, capacity))
    return sum(leaf.size for leaf in jax.tree.leaves(cache.mixers)) // capacity // config.num_layers
