"""The models: an encoder or a decoder, and an encoder with a decoder."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.layers.cache import Cache, LayerCache
from transformer_jax.layers.embedding import Embedder, Logits, word_table
from transformer_jax.layers.head import Classifier, HeadLayer, pool
from transformer_jax.models.checks import check_length, check_tokens
from transformer_jax.models.output import ModelOutput
from transformer_jax.models.stack import LayerOutput, Stack, StackInputs, choices, total_losses
from transformer_jax.models.vision import VisionEncoder
from transformer_jax.ops.masks import Mask, positions_from_mask, positions_from_segments


def _place(config: ModelConfig, tokens_BT, mask_BT, positions_BT, segment_ids_BT):
    """Checks tokens on the host; returns (mask, positions), positions counted where not given."""
    check_tokens(tokens_BT, config.vocab_size)
    check_length(config, positions_BT, tokens_BT.shape[1])
    mask_BT = None if mask_BT is None else jnp.asarray(mask_BT).astype(bool)
    if positions_BT is None:
        if segment_ids_BT is not None:
            positions_BT = positions_from_segments(segment_ids_BT)
        elif mask_BT is not None:
            positions_BT = positions_from_mask(mask_BT)
        else:
            positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    mask = Mask(
        key_valid_BS=mask_BT,
        query_segments_BT=segment_ids_BT,
        key_segments_BS=segment_ids_BT,
        query_positions_BT=positions_BT,
        key_positions_BS=positions_BT,
    )
    return mask, positions_BT


def _extend(config: ModelConfig, cache: Cache, tokens_BT, mask_BT):
    """Checks tokens on the host; returns (cache with room for them, positions, mask, each layer's cache)."""
    check_tokens(tokens_BT, config.vocab_size)
    filled = cache.filled
    cache, positions_BT, mask = cache.extend(jnp.ones_like(tokens_BT) if mask_BT is None else jnp.asarray(mask_BT))
    check_length(config, positions_BT, tokens_BT.shape[1])
    cross = cache.cross or (None,) * len(cache.mixers)
    layers = zip(cache.mixers, cross, strict=True)
    return cache, positions_BT, mask, tuple(LayerCache(mixer, stored, filled) for mixer, stored in layers)


def _collect(embedded, hidden, outputs: list[LayerOutput], prefix: str, return_hiddens, return_attentions):
    fields = {f'{prefix}hidden': hidden}
    if return_hiddens:
        fields[f'{prefix}hiddens'] = (embedded, *(output.hidden_BTD for output in outputs[:-1]), hidden)
    if return_attentions:
        fields[f'{prefix}attentions'] = tuple(output.attention_BNTS for output in outputs)
    return fields


def _real(mask_BT, segment_ids_BT):
    """Returns which tokens are no padding, None if all are."""
    if segment_ids_BT is None:
        return None if mask_BT is None else jnp.asarray(mask_BT).astype(bool)
    real_BT = jnp.asarray(segment_ids_BT) != 0
    return real_BT if mask_BT is None else real_BT & jnp.asarray(mask_BT).astype(bool)


class LanguageModel(nn.Module):
    """One stack: an encoder (every token sees every token) or a decoder (each sees those before it)."""

    config: ModelConfig

    def setup(self):
        config = self.config
        tied = config.head == 'lm' and config.tie_embeddings in ('output', 'all')
        self.embedding = word_table(config, shared=tied)
        self.embedder = Embedder(config)
        self.stack = Stack(config, config.kind, name=config.kind)
        if config.head_activation != 'none':
            self.head_layer = HeadLayer(config)
        if config.head == 'lm':
            self.head = Logits(config, self.embedding if tied else None)
        if config.head == 'classes':
            self.head = Classifier(config)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        mask: jax.Array | None = None,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        token_types: jax.Array | None = None,
        prefix: jax.Array | None = None,
        cache: Cache | None = None,
        deterministic: bool = True,
        return_hiddens: bool = False,
        return_attentions: bool = False,
    ) -> ModelOutput:
        """Runs the model.

        Args:
          tokens: (B, T) ids.
          mask: (B, T), 1 for real tokens (None: all are).
          positions: (B, T), counted from mask or segments if not given.
          segment_ids: (B, T), tokens of different segments do not see each other; 0 is padding.
          token_types: (B, T), for models which embed them.
          prefix: (B,), so many first tokens of a decoder are seen by all.
          cache: of what was read before; the result then holds the new one.
          deterministic: False turns dropout on, with `rngs={'dropout': key}`.

        Raises:
          UserError: outside jit, for an id outside the vocabulary or a position past `max_positions`.
        """
        config = self.config
        if cache is None:
            visible, positions = _place(config, tokens, mask, positions, segment_ids)
            visible = visible & Mask(causal=config.kind == 'decoder', prefix_B=prefix)
            caches = None
        else:
            cache, positions, visible, caches = _extend(config, cache, tokens, mask)
        x = embedded = self.embedder(self.embedding(tokens), positions, token_types, deterministic)
        inputs = StackInputs(positions, visible, real_BT=_real(mask, segment_ids))
        x, outputs = self.stack(x, inputs, caches, deterministic, return_hiddens, return_attentions)
        fields = _collect(embedded, x, outputs, '', return_hiddens, return_attentions)
        if config.mixture is not None:
            fields['expert_choices'] = {config.kind: choices(outputs)}
        if cache is not None:
            fields['cache'] = cache.replace(mixers=tuple(output.cache.mixer for output in outputs))
        if config.pooling != 'none':
            real = mask if segment_ids is None else segment_ids != 0
            x = fields['pooled'] = self._head_layer(pool(x, real, config.pooling))
            logits = self.head(x, deterministic) if config.head == 'classes' else None
        else:
            logits = self.logits(x) if config.head == 'lm' else None
        return ModelOutput(logits=logits, aux=total_losses(outputs), **fields)

    def _head_layer(self, x: jax.Array) -> jax.Array:
        return x if self.config.head_activation == 'none' else self.head_layer(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the logits (B, T, V) of hidden states (B, T, D), for callers who need those of a few positions."""
        return self.head(self._head_layer(hidden))


class EncoderDecoder(nn.Module):
    """Two stacks: an encoder of the source, and a decoder which also attends to it (Vaswani et al. 2017, section 3)."""

    config: ModelConfig

    def setup(self):
        config = self.config
        tie = config.tie_embeddings
        if tie in ('inputs', 'all'):
            self.embedding = word_table(config, shared=True)
            self.source_table = self.target_table = self.embedding
        else:
            self.source_embedding = word_table(config, shared=False)
            self.target_embedding = word_table(config, shared=tie == 'output')
            self.source_table, self.target_table = self.source_embedding, self.target_embedding
        self.encoder_embedder = Embedder(config)
        self.decoder_embedder = Embedder(config)
        self.encoder = Stack(config, 'encoder')
        self.decoder = Stack(config, 'decoder', cross=True)
        if config.head == 'lm':
            self.head = Logits(config, self.target_table if tie in ('output', 'all') else None)

    def __call__(
        self,
        source_tokens: jax.Array | None = None,
        target_tokens: jax.Array | None = None,
        *,
        source_mask: jax.Array | None = None,
        target_mask: jax.Array | None = None,
        source_positions: jax.Array | None = None,
        target_positions: jax.Array | None = None,
        source_segment_ids: jax.Array | None = None,
        target_segment_ids: jax.Array | None = None,
        cache: Cache | None = None,
        deterministic: bool = True,
        return_hiddens: bool = False,
        return_attentions: bool = False,
    ) -> ModelOutput:
        """Runs both stacks, or with a cache the decoder (and the encoder once, on the cache's source).

        Args:
          source_tokens: (B, S) ids; target_tokens: (B, T) the decoder's inputs, shifted right already.
          source_mask, target_mask: 1 for real tokens (None: all are).
          source_positions, target_positions: counted from masks or segments if not given.
          source_segment_ids, target_segment_ids: packed pairs: a target segment sees itself and the source segment of
            its number; 0 is padding.
          cache: of what was read before; the result then holds the new one.
          deterministic: False turns dropout on, with `rngs={'dropout': key}`.

        Raises:
          UserError: outside jit, for an id outside the vocabulary or a position past `max_positions`.
        """
        config = self.config
        flags = dict(return_hiddens=return_hiddens, return_attentions=return_attentions)
        fields, context, losses, loads = {}, None, {}, {}
        if cache is not None:
            source_tokens, source_mask = cache.source, cache.source_mask
        if source_tokens is not None:
            place = _place(config, source_tokens, source_mask, source_positions, source_segment_ids)
            mask, positions = place
            embedded = self.encoder_embedder(self.source_table(source_tokens), positions, None, deterministic)
            inputs = StackInputs(positions, mask, real_BT=_real(source_mask, source_segment_ids))
            context, outputs = self.encoder(embedded, inputs, None, deterministic, **flags)
            fields |= _collect(embedded, context, outputs, 'encoder_', **flags)
            loads['encoder'] = choices(outputs)
            losses = {f'encoder_{name}': pair for name, pair in total_losses(outputs).items()}
        source_mask = None if source_mask is None else jnp.asarray(source_mask).astype(bool)
        context_mask = Mask(
            key_valid_BS=source_mask, query_segments_BT=target_segment_ids, key_segments_BS=source_segment_ids
        )
        if cache is None:
            visible, positions = _place(config, target_tokens, target_mask, target_positions, target_segment_ids)
            visible, caches = visible & Mask(causal=True), None
        else:
            cache, positions, visible, caches = _extend(config, cache, target_tokens, target_mask)
        embedded = self.decoder_embedder(self.target_table(target_tokens), positions, None, deterministic)
        real = _real(target_mask, target_segment_ids)
        inputs = StackInputs(positions, visible, context_BSD=context, context_mask=context_mask, real_BT=real)
        x, outputs = self.decoder(embedded, inputs, caches, deterministic, **flags)
        fields |= _collect(embedded, x, outputs, '', **flags)
        if config.mixture is not None:
            fields['expert_choices'] = loads | {'decoder': choices(outputs)}
        if return_attentions:
            fields['cross_attentions'] = tuple(output.cross_attention_BNTS for output in outputs)
        if cache is not None:
            fields['cache'] = cache.replace(
                mixers=tuple(output.cache.mixer for output in outputs),
                cross=tuple(output.cache.cross for output in outputs),
                source=None,
            )
        logits = self.head(x) if config.head == 'lm' else None
        return ModelOutput(logits=logits, aux=losses | total_losses(outputs), **fields)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the logits (B, T, V) of hidden states (B, T, D), for callers who need those of a few positions."""
        return self.head(hidden)


def build(config: ModelConfig) -> nn.Module:
    """Returns the linen module of an architecture; its `config` attribute is the given config."""
    if config.kind == 'vision':
        return VisionEncoder(config)
    return EncoderDecoder(config) if config.kind == 'encoder_decoder' else LanguageModel(config)
