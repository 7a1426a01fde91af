"""transformer_jax: the Transformer family in JAX and Flax.

Letters of shapes, used as suffixes of names and in einsums:

    B batch                 D model width            F feed-forward width
    T query/target length   N query heads            E experts
    S key/source length     K key/value heads        V vocabulary
    L layers                H head width

so `query_BTNH` has the axes batch, target length, heads, head width.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = '0.1.0'

# Imported when first used, so that `import transformer_jax` is quick and touches no device.
_FACE = {
    'DecodeConfig': 'transformer_jax.decode_config',
    'ModelConfig': 'transformer_jax.config',
    'build': 'transformer_jax.models',
    'generate': 'transformer_jax.decoding',
    'init_params': 'transformer_jax.models',
    'load_pretrained': 'transformer_jax.huggingface',
    'load_tokenizer': 'transformer_jax.data.tokenizers',
    'preset': 'transformer_jax.presets',
    'restore': 'transformer_jax.training.restore',
    'save_pretrained': 'transformer_jax.huggingface',
}

__all__ = sorted(_FACE)


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'transformer_jax' has no attribute '{name}'")
    return getattr(importlib.import_module(_FACE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_FACE])
