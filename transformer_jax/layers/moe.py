"""A mixture of experts in place of the feed-forward layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.layers.dropout import Dropout
from transformer_jax.layers.feedforward import ACTIVATIONS, FeedForward
from transformer_jax.layers.linear import Kernel
from transformer_jax.ops import experts, routing
from transformer_jax.ops.products import einsum
from transformer_jax.sharding.activations import constrain

Losses = dict[str, tuple[jax.Array, jax.Array]]


class MixtureOutput(NamedTuple):
    """What a mixture gives beside its result.

    Attributes:
      losses: auxiliary losses times their coefficients, each as (sum, number of real tokens).
      chosen_E: how many choices of real tokens went to each expert, fp32.
    """

    losses: Losses
    chosen_E: jax.Array


class Router(nn.Module):
    """logits = x W in fp32 over the experts, and a correction bias which only picks."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        D, E = self.config.d_model, self.config.mixture.num_experts
        kernel = Kernel(self.config, (D, E), ('embed', None), D, E, name='linear')()
        logits = einsum('BTD,DE->BTE', x_BTD.astype(jnp.float32), kernel.astype(jnp.float32))
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
    def __call__(self, x_BTD: jax.Array, real_BT: jax.Array | None, deterministic: bool):
        """Returns (y BTD, `MixtureOutput`).

        Args:
          real_BT: which tokens are real (None: all).
        """
        config, mixture = self.config, self.config.mixture
        B, T, _ = x_BTD.shape
        E, k = mixture.num_experts, mixture.experts_per_token
        real_n = jnp.ones(B * T, bool) if real_BT is None else real_BT.reshape(B * T)
        logits_BTE, bias = Router(config, name='router')(x_BTD)
        logits_nE = logits_BTE.reshape(B * T, E)
        routed = routing.route(logits_nE, bias, mixture)
        chosen_BTk = jnp.where(real_n[:, None], routed.experts_nk, E).reshape(B, T, k)
        weights_BTk = routed.weights_nk.reshape(B, T, k)
        kernels = self._kernels()
        activation = ACTIVATIONS[config.ffn.removeprefix('gated_')]
        if mixture.dispatch == 'dropless':
            key = None if deterministic or not config.ffn_dropout else self.make_rng('dropout')
            x = jnp.asarray(x_BTD)
            y = experts.dropless(x, chosen_BTk, weights_BTk, kernels, activation, config.ffn_dropout, key)
        else:
            y = self._capacity(x_BTD, chosen_BTk, weights_BTk, kernels, activation, deterministic)
        y = y.astype(x_BTD.dtype)
        if mixture.shared_experts:
            width = mixture.shared_experts * (mixture.d_ff or config.d_ff)
            y += FeedForward(config, self.gain, width, name='shared')(x_BTD, deterministic)
        return y, MixtureOutput(self._losses(routed, logits_nE, real_n), routing.choices_per_expert(routed, real_n))

    def _kernels(self) -> experts.Kernels:
        config, mixture = self.config, self.config.mixture
        D, E, F = config.d_model, mixture.num_experts, mixture.d_ff or config.d_ff

        def kernel(name, shape, axes):
            return Kernel(config, (E, *shape), ('experts', *axes), *shape, self.gain, name=f'experts_{name}')()

        up, down = kernel('up', (D, F), ('embed', 'mlp')), kernel('down', (F, D), ('mlp', 'embed'))
        gated = config.ffn.startswith('gated_')
        return experts.Kernels(up, kernel('gate', (D, F), ('embed', 'mlp')) if gated else None, down)

    def _capacity(self, x_BTD, chosen_BTk, weights_BTk, kernels, activation, deterministic) -> jax.Array:
        """Returns y_BTD in fp32; every expert multiplies the same number of slots."""
        config, mixture = self.config, self.config.mixture
        (B, T, D), E, k = x_BTD.shape, mixture.num_experts, mixture.experts_per_token
        groups = routing.group_by_expert(chosen_BTk.reshape(B * T, k), E)
        tokens_m = groups.order_m // k
        slots = math.ceil(mixture.capacity_factor * B * T * k / E)
        kept = (groups.expert_m < E) & (groups.rank_m < slots)
        # An index past the end writes nothing, and reads zeros.
        slot_m = jnp.where(kept, groups.expert_m * slots + groups.rank_m, E * slots)
        rows_mD = jnp.asarray(x_BTD).reshape(B * T, D)[tokens_m]
        held = jnp.zeros((E * slots, D), x_BTD.dtype).at[slot_m].set(rows_mD, mode='drop').reshape(E, slots, D)
        held = constrain(held, 'experts', None, None)
        hidden = einsum('ECD,EDF->ECF', held, kernels.up)
        if kernels.gate is None:
            hidden = activation(hidden)
        else:
            hidden = activation(einsum('ECD,EDF->ECF', held, kernels.gate)) * hidden
        hidden = Dropout(config.ffn_dropout)(constrain(hidden, 'experts', None, 'mlp'), deterministic)
        out = einsum('ECF,EFD->ECD', hidden, kernels.down, jnp.float32).reshape(E * slots, D)
        out_mD = out.at[slot_m].get(mode='fill', fill_value=0)
        weights_m = jnp.where(kept, weights_BTk.ravel()[groups.order_m], 0.0)
        return jnp.zeros((B * T, D), jnp.float32).at[tokens_m].add(out_mD * weights_m[:, None]).reshape(B, T, D)

    def _losses(self, routed: routing.Routing, logits: jax.Array, real_n: jax.Array) -> Losses:
        mixture, losses = self.config.mixture, {}
        count = real_n.sum().astype(jnp.float32)
        if mixture.balance_loss:
            losses['balance'] = (mixture.balance_loss * routing.balance_loss(routed, real_n) * count, count)
        if mixture.z_loss:
            losses['router_z'] = (mixture.z_loss * routing.z_loss(logits, real_n), count)
        return losses
