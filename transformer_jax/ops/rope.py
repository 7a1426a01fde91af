"""Rotary positions (RoPE) and the ways to stretch them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import RopeScaling


def frequencies(width: int, theta: float, scaling: RopeScaling | None = None) -> tuple[np.ndarray, float]:
    """Returns the angles per position of the `width` / 2 pairs, fp64, and the magnitude of cos and sin.

    f_i = theta^(-2i / width) (Su et al. 2021, section 3.2.2), stretched by a factor s:
    linear: f / s (Chen et al. 2023); ntk: theta -> theta s^(w / (w - 2)) (Peng et al. 2023, section 3.1);
    yarn: a ramp from f (fast pairs) to f / s (slow pairs), cos and sin times 0.1 ln s + 1 (section 3.2, 3.4; the ramp
    as in the released code, which published checkpoints were tuned with); llama3: f for wavelengths below
    L / high, f / s above L / low, a ramp between (Grattafiori et al. 2024). 'dynamic' depends on the current length:
    here its plain form, see `dynamic_frequencies`.
    """
    plain = theta ** (-np.arange(0, width, 2) / width)
    if scaling is None or scaling.kind == 'dynamic':
        return plain, 1.0
    if scaling.kind == 'linear':
        return plain / scaling.factor, 1.0
    if scaling.kind == 'ntk':
        return (theta * scaling.factor ** (width / (width - 2))) ** (-np.arange(0, width, 2) / width), 1.0
    if scaling.kind == 'llama3':
        turns = scaling.original_positions * plain / (2 * math.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        keep = np.clip((turns - low) / (high - low), 0, 1)
        return plain * keep + plain / scaling.factor * (1 - keep), 1.0
    keep = _yarn_ramp(width, theta, scaling)
    return plain * keep + plain / scaling.factor * (1 - keep), yarn_magnitude(scaling)


def _yarn_ramp(width: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    def pair_with(turns):
        return width * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0
    return 1 - np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)


def yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    """Returns 0.1 m ln(s) + 1, or 1 where nothing is stretched (Peng et al. 2023, section 3.4; m is DeepSeek's)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_magnitude(scaling: RopeScaling) -> float:
    """Returns what cos and sin are multiplied by; a stated `attention_factor` is final."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        own, all_dim = (yarn_temperature(scaling.factor, m) for m in (scaling.mscale, scaling.mscale_all_dim))
        return own / all_dim
    return yarn_temperature(scaling.factor)


def dynamic_frequencies(width: int, theta: float, scaling: RopeScaling, length_B: jax.Array) -> jax.Array:
    """Returns (B, width / 2) frequencies of dynamic NTK scaling for rows of the given current lengths.

    theta -> theta (s n / L - (s - 1))^(w / (w - 2)) for n = max(length, L), so that nothing changes up to the trained
    length L.
    """
    L = scaling.original_positions
    stretch = scaling.factor * jnp.maximum(length_B, L) / L - (scaling.factor - 1)
    base = theta * stretch.astype(jnp.float32) ** (width / (width - 2))
    return base[:, None] ** jnp.asarray(-np.arange(0, width, 2) / width, jnp.float32)


def rotate(
    x_BTNH: jax.Array, positions_BT: jax.Array, frequencies: jax.Array | np.ndarray, magnitude: float, layout: str
) -> jax.Array:
    """Rotates pairs of features by position times frequency; features beyond 2 x pairs pass unchanged.

    (u, w) -> m (u cos a - w sin a, w cos a + u sin a), a = p f_i, so that scores depend on distances alone.
    Angles, cos and sin are fp32 whatever x is. Layout 'half' pairs (i, i + width / 2) (GPT-NeoX, Hugging Face LLaMA),
    'interleaved' pairs (2i, 2i + 1) (RoFormer, GPT-J).

    Args:
      frequencies: (pairs,) or, for dynamic scaling, (B, pairs).
    """
    table = jnp.asarray(frequencies, jnp.float32)
    angles = positions_BT.astype(jnp.float32)[..., None] * (table if table.ndim == 1 else table[:, None])
    cos, sin = (magnitude * wave(angles)[:, :, None] for wave in (jnp.cos, jnp.sin))
    width = 2 * table.shape[-1]
    turned, rest = x_BTNH[..., :width].astype(jnp.float32), x_BTNH[..., width:]
    if layout == 'half':
        u, w = jnp.split(turned, 2, axis=-1)
        turned = jnp.concatenate([u * cos - w * sin, w * cos + u * sin], axis=-1)
    else:
        u, w = turned[..., 0::2], turned[..., 1::2]
        turned = jnp.stack([u * cos - w * sin, w * cos + u * sin], axis=-1).reshape(turned.shape)
    return jnp.concatenate([turned.astype(x_BTNH.dtype), rest], axis=-1)
