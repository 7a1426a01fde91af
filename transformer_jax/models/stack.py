"""A stack of layers: one block per layer, scanned over the repeating period or unrolled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.layers.attention import Attention
from transformer_jax.layers.cache import LayerCache
from transformer_jax.layers.feedforward import FeedForward
from transformer_jax.layers.latent_attention import LatentAttention
from transformer_jax.layers.moe import Losses, MixtureOfExperts, MixtureOutput
from transformer_jax.layers.norm import Norm
from transformer_jax.layers.residual import Residual, deepnorm
from transformer_jax.ops.masks import Mask
from transformer_jax.ops.positions import alibi_bias, relative_bucket

REMAT_POLICIES = {
    'full': lambda: jax.checkpoint_policies.nothing_saveable,
    'dots': lambda: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    'offload': lambda: jax.checkpoint_policies.offload_dot_with_no_batch_dims('device', 'pinned_host'),
}


@flax.struct.dataclass
class StackInputs:
    """What every layer of a stack reads alike.

    Attributes:
      positions_BT: positions of the tokens.
      mask: which key a query of self-attention sees; bias_BNTS: added to its scores (ALiBi, T5).
      context_BSD: the encoder's output, for cross-attention; context_mask: which of it a query sees.
      real_BT: which tokens are no padding (None: all), for experts.
    """

    positions_BT: jax.Array
    mask: Mask
    bias_BNTS: jax.Array | None = None
    context_BSD: jax.Array | None = None
    context_mask: Mask | None = None
    real_BT: jax.Array | None = None


@flax.struct.dataclass
class LayerOutput:
    """What a layer, or a stack of layers on a leading L axis, gives beside its hidden state.

    Attributes:
      hidden_BTD: the hidden state, if asked for.
      attention_BNTS, cross_attention_BNTS: attention weights, if asked for.
      cache: the layer's new cache, if there was one.
      mixture: auxiliary losses and load of its experts, if it has any.
    """

    hidden_BTD: jax.Array | None
    attention_BNTS: jax.Array | None
    cross_attention_BNTS: jax.Array | None
    cache: LayerCache | None
    mixture: MixtureOutput | None = None


def total_losses(outputs: list[LayerOutput]) -> Losses:
    """Returns each auxiliary loss summed over layers; its weight, the tokens, is the same in every layer."""
    totals: Losses = {}
    for output in outputs:
        for name, (loss, weight) in ({} if output.mixture is None else output.mixture.losses).items():
            totals[name] = (totals[name][0] + loss if name in totals else loss, weight)
    return totals


def choices(outputs: list[LayerOutput]) -> tuple[jax.Array | None, ...]:
    """Returns how many choices of real tokens went to each expert, (E,) for each layer, None for a dense one."""
    return tuple(None if output.mixture is None else output.mixture.chosen_E for output in outputs)


def at_layer(tree: Any, index: int) -> Any:
    """Returns entry `index` of the leading axis of every leaf."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


class Block(nn.Module):
    """One layer: self-attention, cross-attention in a decoder with a context, and feed-forward, each in `Residual`.

    Attributes:
      stack: 'encoder' or 'decoder'.
      layer_kind: 'global' or 'local'.
      cross: whether there is cross-attention.
      first: whether it is the first layer.
      dense: whether its feed-forward layer is dense whatever the config says.
      deterministic: no dropout.
      return_hiddens, return_attentions: what `LayerOutput` holds.
    """

    config: ModelConfig
    stack: str
    layer_kind: str
    cross: bool
    first: bool
    dense: bool
    deterministic: bool
    return_hiddens: bool
    return_attentions: bool

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, inputs: StackInputs, cache: LayerCache | None = None
    ) -> tuple[jax.Array, LayerOutput]:
        config, deterministic = self.config, self.deterministic
        alpha, beta = deepnorm(config, self.stack)
        if config.latent is None:
            attend = Attention(config, self.layer_kind, gain=beta, name='attention')
        else:
            attend = LatentAttention(config, gain=beta, name='attention')
        routed = config.mixture is not None and not self.dense
        ffn = (MixtureOfExperts if routed else FeedForward)(config, gain=beta, name='ffn')

        def feed_forward(x):
            return ffn(x, inputs.real_BT, deterministic) if routed else (ffn(x, deterministic), None)

        in_norm = config.first_norm or not self.first
        residual = Residual(config, alpha, in_norm=in_norm, name='attention_residual')
        ffn_residual = Residual(config, alpha, in_norm=config.norm_position != 'parallel', name='ffn_residual')

        entered = residual.enter(x_BTD)
        y, mixer, weights = attend(
            entered, None, inputs.mask, inputs.bias_BNTS, inputs.positions_BT,
            cache, deterministic, self.return_attentions,
        )  # fmt: skip
        cross_weights = cross = None
        if config.norm_position in ('parallel', 'parallel_two_norms'):
            shared = config.norm_position == 'parallel'
            branch, mixture = feed_forward(entered if shared else ffn_residual.enter(x_BTD))
            x_BTD = residual.leave(x_BTD, y, deterministic)
        else:
            x_BTD = residual.leave(x_BTD, y, deterministic)
            if self.cross:
                cross_residual = Residual(config, alpha, name='cross_attention_residual')
                y, cross, cross_weights = Attention(config, cross=True, gain=beta, name='cross_attention')(
                    cross_residual.enter(x_BTD), inputs.context_BSD, inputs.context_mask, None, inputs.positions_BT,
                    cache, deterministic, self.return_attentions,
                )  # fmt: skip
                x_BTD = cross_residual.leave(x_BTD, y, deterministic)
            branch, mixture = feed_forward(ffn_residual.enter(x_BTD))
        x_BTD = ffn_residual.leave(x_BTD, branch, deterministic)
        new_cache = None if cache is None else LayerCache(mixer, cross, cache.filled)
        hidden = x_BTD if self.return_hiddens else None
        return x_BTD, LayerOutput(hidden, weights, cross_weights, new_cache, mixture)


class Period(nn.Module):
    """The blocks of one period of the layer pattern, the body of the scan."""

    block: type[nn.Module]
    config: ModelConfig
    options: Mapping[str, Any]

    @nn.compact
    def __call__(self, x_BTD: jax.Array, inputs: StackInputs) -> tuple[jax.Array, tuple[LayerOutput, ...]]:
        outputs = []
        for j, kind in enumerate(self.config.layer_pattern):
            flags = dict(layer_kind=kind, first=False, dense=False)
            block = self.block(self.config, **flags, **self.options, name=f'block_{j}')
            x_BTD, output = block(x_BTD, inputs)
            outputs.append(output)
        return x_BTD, tuple(outputs)


class Stack(nn.Module):
    """x_l = layer_l(x_{l-1}), then the final norm where the placement has one.

    With `layer_stack='scan'` the layers of each whole period lie in `layers/block_j` with a leading axis of L / period
    and are compiled once; a differing prefix, what is left over, and every layer when unrolled lie in `layers_i`.

    Attributes:
      name_of_stack: 'encoder' or 'decoder'; cross: whether its layers have cross-attention.
    """

    config: ModelConfig
    name_of_stack: str
    cross: bool = False

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        inputs: StackInputs,
        caches: tuple[LayerCache, ...] | None = None,
        deterministic: bool = True,
        return_hiddens: bool = False,
        return_attentions: bool = False,
    ) -> tuple[jax.Array, list[LayerOutput]]:
        """Returns the last hidden state after the final norm, and each layer's output.

        Args:
          caches: one for each layer; decoding runs unrolled layers, see `decoding.cache_api.for_decoding`.
        """
        config = self.config
        inputs = inputs.replace(bias_BNTS=self._bias(inputs, x_BTD.shape[1]))
        options = dict(
            stack=self.name_of_stack,
            cross=self.cross,
            deterministic=deterministic,
            return_hiddens=return_hiddens,
            return_attentions=return_attentions,
        )
        depth, period = config.depth(self.name_of_stack), len(config.layer_pattern)
        prefix = min(config.prefix_layers, depth) if config.layer_stack == 'scan' else 0
        repeats = (depth - prefix) // period if config.layer_stack == 'scan' else 0
        block = Block
        if config.remat != 'none':
            policy = REMAT_POLICIES[config.remat]()
            block = nn.remat(Block, policy=policy, prevent_cse=config.layer_stack != 'scan')
        outputs = []

        def run(i, x_BTD):
            own = dict(layer_kind=config.layer_pattern[i % period], first=i == 0, dense=i < config.dense_layers)
            layer = block(config, **own, **options, name=f'layers_{i}')
            x_BTD, output = layer(x_BTD, inputs, None if caches is None else caches[i])
            outputs.append(output)
            return x_BTD

        for i in range(prefix):
            x_BTD = run(i, x_BTD)
        if repeats:
            scan = nn.scan(
                Period,
                variable_axes={'params': 0},
                split_rngs={'params': True, 'dropout': True},
                in_axes=nn.broadcast,
                length=repeats,
                metadata_params={nn.PARTITION_NAME: 'layers'},
            )
            x_BTD, stacked = scan(block, config, options, name='layers')(x_BTD, inputs)
            for repeat in range(repeats):
                outputs += [at_layer(output, repeat) for output in stacked]
        for i in range(prefix + repeats * period, depth):
            x_BTD = run(i, x_BTD)
        if config.has_final_norm:
            x_BTD = Norm(config, name='final_norm')(x_BTD)
        return x_BTD, outputs

    def _bias(self, inputs: StackInputs, T: int) -> jax.Array | None:
        config = self.config
        if config.position not in ('alibi', 'relative'):
            return None
        queries_BT = inputs.positions_BT
        keys_BS = queries_BT if inputs.mask.key_positions_BS is None else inputs.mask.key_positions_BS
        if config.position == 'alibi':
            return alibi_bias(queries_BT, keys_BS, config.num_heads)
        bucket_BTS = relative_bucket(
            keys_BS[:, None, :] - queries_BT[:, :, None],
            bidirectional=self.name_of_stack == 'encoder',
            buckets=config.relative_buckets,
            max_distance=config.relative_max_distance,
        )
        init = nn.with_logical_partitioning(nn.initializers.normal(config.d_model**-0.5), ('buckets', 'heads'))
        shape = (config.relative_buckets, config.num_heads)
        table = self.param('relative_bias', init, shape, jnp.dtype(config.param_dtype))
        return jnp.moveaxis(table.astype(jnp.float32)[bucket_BTS], -1, 1)
