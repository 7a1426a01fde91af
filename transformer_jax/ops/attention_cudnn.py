"""Attention on NVIDIA GPUs: cuDNN's fused kernels behind `jax.nn.dot_product_attention`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer_jax.ops.attention_inputs import Inputs

_WIDEST_HEAD = 128


def unsupported(inputs: Inputs, platform: str) -> str | None:
    """Returns the first feature of a call which cuDNN lacks, None if it has them all."""
    (T, S), H = inputs.lengths, inputs.query_BTNH.shape[-1]
    if platform != 'gpu':
        return f"the platform '{platform}'; it needs an NVIDIA GPU"
    if inputs.query_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f'{inputs.query_BTNH.dtype}; it has bfloat16 and float16'
    if inputs.softcap is not None:
        return 'a soft-cap of the scores'
    if inputs.drop is not None:
        return 'dropout of attention weights'
    if inputs.value_BSKH.shape[-1] != H:
        return f'value heads of width {inputs.value_BSKH.shape[-1]} beside key heads of width {H}'
    if H % 8 or H > _WIDEST_HEAD:
        return f'heads of width {H}; it has multiples of 8 up to {_WIDEST_HEAD}'
    if inputs.bias_BNTS is not None and (T % 2 or S % 2):
        return f'a bias on {T} queries and {S} keys; both must be even'
    return None


def attend(inputs: Inputs, platform: str) -> jax.Array:
    """Returns out BTNV (Dao et al. 2022). A mask which is more than causal is read as an array of booleans."""
    (T, S), mask, bias_BNTS = inputs.lengths, inputs.mask, inputs.bias_BNTS
    causal = mask.causal and mask.window is None and not jax.tree.leaves(mask) and T == S
    visible_BTS = None if causal else mask.visible(T, S)
    if bias_BNTS is not None:
        bias_BNTS = jnp.broadcast_to(bias_BNTS, (*bias_BNTS.shape[:2], T, S)).astype(inputs.query_BTNH.dtype)
    out = jax.nn.dot_product_attention(
        inputs.query_BTNH,
        inputs.key_BSKH,
        inputs.value_BSKH,
        bias_BNTS,
        None if visible_BTS is None else visible_BTS[:, None],
        scale=inputs.scale,
        is_causal=causal,
        implementation='cudnn',
    )
    # A row without a key would be given the mean of all values.
    return out if visible_BTS is None else jnp.where(visible_BTS.any(-1)[:, :, None, None], out, 0)
