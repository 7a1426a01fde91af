"""A mixture of experts in place of the feed-forward layer."""

from __future__ import annotations

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.layers.dropout import Dropout
from transformer_jax.layers.feedforward import ACTIVATIONS, FeedForward
from transformer_jax.layers.linear import Kernel
from transformer_jax.ops import routing
from transformer_jax.ops.products import einsum

Losses = dict[str, tuple[jax.Array, jax.Array]]


class Router(nn.Module):
    """logits = x W in fp32 over the experts, and a correction bias which only picks."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_nD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        D, E = self.config.d_model, self.config.mixture.num_experts
        kernel = Kernel(self.config, (D, E), ('embed', None), D, E, name='linear')()
        logits = einsum('nD,DE->nE', x_nD.astype(jnp.float32), kernel.astype(jnp.float32))
        if not self.config.mixture.correction_bias:
            return logits, None
        init = nn.with_logical_partitioning(nn.initializers.zeros, (None,))
        return logits, self.param('bias', init, (E,), jnp.dtype(self.config.param_dtype))


class MixtureOfExperts(nn.Module):
    """y = sum_i g_i FFN_i(x) over a token's k experts, plus FFN_shared(x); see `ops.routing` for the weights g.

    Shazeer et al. 2017, section 2; shared experts: Dai et al. 2024, section 3.2. 'dropless' sorts the tokens by expert
    and multiplies groups of any size (Gale et al. 2022); 'capacity' gives every expert as many slots (Lepikhin et al.
    2020, section 2.2; Fedus et al. 2021, section 2.2), first choices first, and a choice without a slot adds nothing.

    Padding is not routed: it is in no expert's group, takes no slot, and is not counted by the losses.

    Attributes:
      gain: of the initial projections (DeepNorm's beta).
    """

    config: ModelConfig
    gain: float = 1.0

    @nn.compact
    def __call__(self, x_BTD: jax.Array, real_BT: jax.Array | None, deterministic: bool) -> tuple[jax.Array, Losses]:
        """Returns (y BTD, auxiliary losses times their coefficients, each as (sum, number of real tokens)).

        Args:
          real_BT: which tokens are real (None: all).
        """
        config, mixture = self.config, self.config.mixture
        B, T, D = x_BTD.shape
        x_nD = jnp.asarray(x_BTD).reshape(B * T, D)
        real_n = jnp.ones(B * T, bool) if real_BT is None else real_BT.reshape(B * T)
        logits, bias = Router(config, name='router')(x_nD)
        routed = routing.route(logits, bias, mixture)
        groups = routing.group_by_expert(routed.experts_nk, real_n, mixture.num_experts)
        kept = groups.expert_m < mixture.num_experts
        tokens_m = groups.order_m // mixture.experts_per_token
        if mixture.dispatch == 'dropless':
            product = self._experts(lambda x, kernel: routing.grouped_product(x, kernel, groups.sizes_E))
            out_mD = product(x_nD[tokens_m], deterministic)
        else:
            E, n = mixture.num_experts, B * T
            slots = math.ceil(mixture.capacity_factor * n * mixture.experts_per_token / E)
            kept &= groups.rank_m < slots
            # An index past the end writes nothing, and reads zeros.
            slot_m = jnp.where(kept, groups.expert_m * slots + groups.rank_m, E * slots)
            held = jnp.zeros((E * slots, D), x_nD.dtype).at[slot_m].set(x_nD[tokens_m], mode='drop')
            product = self._experts(lambda x, kernel: einsum('ECA,EAB->ECB', x, kernel))
            out = product(held.reshape(E, slots, D), deterministic).reshape(E * slots, D)
            out_mD = out.at[slot_m].get(mode='fill', fill_value=0)
        weights_m = jnp.where(kept, routed.weights_nk.ravel()[groups.order_m], 0.0)
        weighed = out_mD.astype(jnp.float32) * weights_m[:, None]
        y_nD = jnp.zeros((B * T, D), jnp.float32).at[tokens_m].add(weighed).astype(x_BTD.dtype)
        y = y_nD.reshape(B, T, D)
        if mixture.shared_experts:
            width = mixture.shared_experts * (mixture.d_ff or config.d_ff)
            y += FeedForward(config, self.gain, width, name='shared')(x_BTD, deterministic)
        return y, self._losses(routed, logits, real_n)

    def _experts(self, product: Callable[[jax.Array, jax.Array], jax.Array]):
        """Returns FFN of rows which are laid out by expert, given the product of such rows with a matrix per expert."""
        config, mixture = self.config, self.config.mixture
        D, E, F = config.d_model, mixture.num_experts, mixture.d_ff or config.d_ff

        def kernel(name, shape, axes):
            return Kernel(config, (E, *shape), ('experts', *axes), *shape, self.gain, name=f'experts_{name}')()

        up, down = kernel('up', (D, F), ('embed', 'mlp')), kernel('down', (F, D), ('mlp', 'embed'))
        gated = config.ffn.startswith('gated_')
        gate = kernel('gate', (D, F), ('embed', 'mlp')) if gated else None
        activation = ACTIVATIONS[config.ffn.removeprefix('gated_')]

        def feed_forward(x, deterministic):
            hidden = product(x, up)
            hidden = activation(product(x, gate)) * hidden if gated else activation(hidden)
            return product(Dropout(config.ffn_dropout)(hidden, deterministic), down)

        return feed_forward

    def _losses(self, routed: routing.Routing, logits: jax.Array, real_n: jax.Array) -> Losses:
        mixture, losses = self.config.mixture, {}
        count = real_n.sum().astype(jnp.float32)
        if mixture.balance_loss:
            losses['balance'] = (mixture.balance_loss * routing.balance_loss(routed, real_n) * count, count)
        if mixture.z_loss:
            losses['router_z'] = (mixture.z_loss * routing.z_loss(logits, real_n), count)
        return losses
