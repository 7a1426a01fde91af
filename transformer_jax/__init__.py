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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # For type checkers and editors; `_FACE` imports the same when it is used.
    from transformer_jax.config import ModelConfig as ModelConfig
    from transformer_jax.data.tokenizers import load_tokenizer as load_tokenizer
    from transformer_jax.decode_config import DecodeConfig as DecodeConfig
    from transformer_jax.decoding import generate as generate
    from transformer_jax.huggingface import load_pretrained as load_pretrained
    from transformer_jax.huggingface import save_pretrained as save_pretrained
    from transformer_jax.models import build as build
    from transformer_jax.models import init_params as init_params
    from transformer_jax.presets import preset as preset
    from transformer_jax.quantization import quantize as quantize
    from transformer_jax.training.restore import restore as restore

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
    'quantize': 'transformer_jax.quantization',
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
