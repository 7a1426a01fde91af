"""Multi-head latent attention (DeepSeek-V2): keys and values of all heads from one small vector per token."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.layers.cache import Latents, LayerCache
from transformer_jax.layers.linear import Kernel, Linear
from transformer_jax.layers.norm import Norm
from transformer_jax.ops import attention as ops
from transformer_jax.ops import rope
from transformer_jax.ops.masks import Mask
from transformer_jax.ops.products import einsum
from transformer_jax.sharding.activations import constrain


class LatentAttention(nn.Module):
    """Attention whose keys [c U_K^n ; r] and values c U_V^n are linear in the latent c = norm(x W_c), r = RoPE(x W_r).

    Queries are [q ; RoPE(q_r)] per head, of x or of its own latent norm(x W_q). Only c and r are cached, R + P numbers
    per token for all heads. DeepSeek-V2 2024, section 2.1.2 and appendix C.

    Absorbed, the same function: (q U_K^T) c^T in place of q (c U_K)^T, and (weights c) U_V in place of weights (c U_V):
    multi-query attention on the latents, which is what decoding wants, since no cached token is expanded.
    """

    config: ModelConfig
    gain: float = 1.0

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        context_BSD: jax.Array | None,
        mask: Mask,
        bias_BNTS: jax.Array | None,
        positions_BT: jax.Array,
        cache: LayerCache | None,
        deterministic: bool,
        return_weights: bool = False,
    ) -> tuple[jax.Array, Latents | None, jax.Array | None]:
        """Returns (y BTD, new cache, weights BNTS or None); the arguments of every mixer, the context is not used."""
        config, latent = self.config, self.config.latent
        D, N, H, V = config.d_model, config.num_heads, config.key_dim, config.value_dim
        R, P = latent.kv_rank, latent.rotary_dim
        C = H - P
        table, magnitude = rope.frequencies(P, config.rope_theta, config.rope_scaling)

        def rotate(x_BTNP):
            return rope.rotate(x_BTNP, positions_BT, table, magnitude, config.rope_layout)

        query = self._query(x_BTD)
        content, rotary = query[..., :C], rotate(query[..., C:])
        down = Linear(config, (D, R + P), ('embed', None), use_bias=config.qkv_bias, name='down')(x_BTD)
        own = [Norm(config, axis=None, name='latent_norm')(down[..., :R]), rotate(down[..., None, R:])[..., 0, :]]
        stored = Latents(jnp.concatenate(own, axis=-1))
        if cache is not None:
            stored = cache.write(stored)
        up = Kernel(config, (R, N, C + V), (None, 'heads', 'head_dim'), R, N * (C + V), name='up')()
        state = stored.latent_BSR
        absorbs = self._absorbs(x_BTD.shape[1], state.shape[1])
        if absorbs:
            query = jnp.concatenate([einsum('BTNC,RNC->BTNR', content, up[..., :C]), rotary], axis=-1)
            key, value = state[:, :, None], state[:, :, None, :R]
        else:
            expanded = einsum('BSR,RNC->BSNC', state[..., :R], up)
            shared = jnp.broadcast_to(state[:, :, None, R:], (*state.shape[:2], N, P))
            query = jnp.concatenate([content, rotary], axis=-1)
            key, value = jnp.concatenate([expanded[..., :C], shared], axis=-1), expanded[..., C:]
        query = constrain(query, 'batch', 'length', 'heads', None)
        key, value = (constrain(x, 'batch', None, 'heads', None) for x in (key, value))
        drop = None
        if config.attention_dropout and not deterministic:
            drop = ops.Dropout(config.attention_dropout, self.make_rng('dropout'))
        out, weights = ops.attention(
            query, key, value, mask, scale=config.scale, bias_BNTS=bias_BNTS, softcap=config.attention_softcap,
            drop=drop, backend=config.attention_backend, return_weights=return_weights,
        )  # fmt: skip
        if absorbs:
            out = einsum('BTNR,RNV->BTNV', out, up[..., C:])
        shape, axes = (N, V, D), ('heads', 'head_dim', 'embed')
        y = Linear(config, shape, axes, inputs=2, use_bias=config.out_bias, gain=self.gain, name='out')(out)
        return y, None if cache is None else stored, weights

    def _query(self, x_BTD: jax.Array) -> jax.Array:
        config, rank = self.config, self.config.latent.query_rank
        D, N, H = config.d_model, config.num_heads, config.key_dim
        if rank is None:
            return Linear(config, (D, N, H), ('embed', 'heads', 'head_dim'), name='query')(x_BTD)
        down = Linear(config, (D, rank), ('embed', None), use_bias=config.qkv_bias, name='query_down')(x_BTD)
        down = Norm(config, axis=None, name='query_norm')(down)
        return Linear(config, (rank, N, H), (None, 'heads', 'head_dim'), name='query_up')(down)

    def _absorbs(self, T: int, S: int) -> bool:
        """Whether the absorbed form is taken: where it needs fewer products, as for a step on a long cache."""
        config, latent = self.config, self.config.latent
        if latent.form != 'auto':
            return latent.form == 'absorbed'
        R, P, H, V = latent.kv_rank, latent.rotary_dim, config.key_dim, config.value_dim
        projections = R * (H - P + V)
        return T * projections + T * S * (2 * R + P) < S * projections + T * S * (H + V)
