"""What a model returns."""

from __future__ import annotations

import flax.struct
import jax

from transformer_jax.layers.cache import Cache


@flax.struct.dataclass
class ModelOutput:
    """The result of `model.apply`; a field which was not asked for, or which the architecture lacks, is None.

    Attributes:
      logits: (B, T, V) fp32; with `ModelConfig.vocab_multiple` V is rounded up, and -inf past the vocabulary.
      hidden: (B, T, D), after the last norm; of the decoder in an encoder-decoder, as every unprefixed field.
      pooled: (B, D), what stands for the whole sequence, for encoders which pool.
      hiddens: L + 1 arrays, from the input of layer 1 to `hidden`.
      attentions: L arrays BNTS; cross_attentions: those of the decoder on the source.
      encoder_hidden, encoder_hiddens, encoder_attentions: the same of an encoder-decoder's encoder.
      aux: auxiliary losses by name, each as (sum, weight).
      expert_choices: by stack, 'encoder' or 'decoder', for each layer how many choices of real tokens went to each of
        its experts, (E,) fp32, or None for a dense layer; empty without a mixture.
      cache: the new cache, if one was passed in.
    """

    logits: jax.Array | None = None
    hidden: jax.Array | None = None
    pooled: jax.Array | None = None
    hiddens: tuple[jax.Array, ...] | None = None
    attentions: tuple[jax.Array, ...] | None = None
    cross_attentions: tuple[jax.Array, ...] | None = None
    encoder_hidden: jax.Array | None = None
    encoder_hiddens: tuple[jax.Array, ...] | None = None
    encoder_attentions: tuple[jax.Array, ...] | None = None
    aux: dict[str, tuple[jax.Array, jax.Array]] = flax.struct.field(default_factory=dict)
    expert_choices: dict[str, tuple[jax.Array | None, ...]] = flax.struct.field(default_factory=dict)
    cache: Cache | None = None
