"""Rows of hypotheses of each sentence, best first: what every search keeps and returns."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hypotheses:
    """Rows of hypotheses, best first.

    Attributes:
      scores_BK: sum of processed log-probabilities (live) or that over the length penalty (finished); -inf marks an
        empty place.
      tokens_BKT: ids, padded after their end.
      lengths_BK: generated tokens, end token included.
      log_probs_BKT: the model's own log-probabilities; None unless asked for.
    """

    scores_BK: jax.Array
    tokens_BKT: jax.Array
    lengths_BK: jax.Array
    log_probs_BKT: jax.Array | None

    def take(self, index_BQ: jax.Array) -> Hypotheses:
        """Returns the hypotheses `index_BQ` of each sentence."""
        return jax.tree.map(lambda leaf: take(leaf, index_BQ), self)

    def best(self, count: int) -> Hypotheses:
        """Returns the best `count` of each sentence, an earlier one before a later equal."""
        return self.take(jax.lax.top_k(self.scores_BK, count)[1])

    def by_sentence(self, count: int) -> Hypotheses:
        """Returns rows which are one hypothesis each (no K axis) by sentence, `count` of each, the best first."""
        return jax.tree.map(lambda leaf: leaf.reshape(-1, count, *leaf.shape[1:]), self).best(count)


def join(parts: list[Hypotheses]) -> Hypotheses:
    """Returns the hypotheses of all parts, sentence by sentence, those of the first part first."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *parts)


def take(leaf: jax.Array, index_BQ: jax.Array) -> jax.Array:
    """leaf[b, index_BQ[b, q]] along axis 1; the indices come from a search over that axis and are in bounds."""
    return leaf.at[jnp.arange(leaf.shape[0])[:, None], index_BQ].get(mode='promise_in_bounds')
