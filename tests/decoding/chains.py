"""Tiny language models for the tests of search, twice: as a numpy function of the whole prefix, and as a cache.

The next token's logits are a random table's row, chosen by a hash of every token so far. Whoever reorders the cache
wrongly, or lets a row read a token too many, lands in another row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

STATES = 61


class Chains:
    """`batch` random chains over `vocabulary` words, decoded together as rows 0 ... batch - 1."""

    def __init__(self, batch: int, vocabulary: int, seed: int = 0, sharp: float = 1.5):
        self.tables = (np.random.default_rng(seed).normal(size=(batch, STATES, vocabulary)) * sharp).astype(np.float32)

    def log_probs(self, row: int, prefix: tuple[int, ...]) -> np.ndarray:
        """Float64 log-probabilities after `prefix`."""
        state = 1
        for token in prefix:
            state = (state * 7 + token + 3) % STATES
        logits = self.tables[row, state].astype(np.float64)
        return logits - np.log(np.exp(logits).sum())


def begin(tables: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Logits after an empty prompt, and the cache: one row per chain."""
    return tables[:, 1], {'state': jnp.ones(len(tables), jnp.int32)}


def step_fn(tables: jax.Array):
    """The step of the search loops: reads one token per row; the rows of a chain stand together."""

    def step(tokens_R1: jax.Array, cache: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        state_R = (cache['state'] * 7 + tokens_R1[:, 0] + 3) % STATES
        row_R = jnp.arange(len(state_R)) // (len(state_R) // len(tables))
        return tables[row_R, state_R], {'state': state_R}

    return step


def gather(cache: dict[str, jax.Array], index_R: jax.Array) -> dict[str, jax.Array]:
    return jax.tree.map(lambda leaf: leaf[index_R], cache)


def penalty(length: int, alpha: float, kind: str) -> float:
    return ((5 + length) / 6) ** alpha if kind == 'gnmt' else float(length) ** alpha


def enumerate_all(log_probs, eos_ids, limit: int, alpha: float, kind: str) -> list[tuple[float, tuple[int, ...]]]:
    """(score, tokens) of every answer of at most `limit` tokens, ended or cut, best first."""
    answers, stack = [], [((), 0.0)]
    while stack:
        prefix, total = stack.pop()
        for token, value in enumerate(log_probs(prefix)):
            tokens, new_total = (*prefix, token), total + value
            if token in eos_ids or len(tokens) == limit:
                answers.append((new_total / penalty(len(tokens), alpha, kind), tokens))
            else:
                stack.append((tokens, new_total))
    return sorted(answers, key=lambda answer: -answer[0])


def textbook_beams(
    log_probs,
    eos_ids,
    limit: int,
    beams: int,
    alpha: float,
    kind: str,
    early_stopping: str,
    groups: int = 1,
    diversity: float = 0.0,
) -> list[tuple[float, tuple[int, ...]]]:
    """Beam search with lists: candidates sorted, the best `beams` may finish, the rest goes on."""
    size = beams // groups
    live = [[((), 0.0)] for _ in range(groups)]
    finished = [[] for _ in range(groups)]
    closed = [False] * groups
    for length in range(1, limit + 1):
        chosen = {}
        for g in range(groups):
            if closed[g]:
                continue
            candidates = sorted(
                (
                    (total + value - diversity * chosen.get(token, 0), (*prefix, token))
                    for prefix, total in live[g]
                    for token, value in enumerate(log_probs(prefix))
                ),
                key=lambda candidate: -candidate[0],
            )
            ending = [length == limit or tokens[-1] in eos_ids for _, tokens in candidates]
            everything = len(ending) - sum(ending) <= size
            kept = max(2, 1 + len(eos_ids)) * size
            finished[g] += [
                (total / penalty(length, alpha, kind), tokens)
                for rank, ((total, tokens), ends) in enumerate(zip(candidates, ending, strict=True))
                if ends and (rank < size or (everything and len(candidates) <= kept))
            ]
            finished[g] = sorted(finished[g], key=lambda answer: -answer[0])[:size]
            going = [candidate for candidate, ends in zip(candidates[:kept], ending[:kept], strict=True) if not ends]
            live[g] = [(tokens, total) for total, tokens in going[:size]]
            for tokens, _ in live[g]:
                chosen[tokens[-1]] = chosen.get(tokens[-1], 0) + 1
            if not live[g]:
                closed[g] = True
            elif len(finished[g]) == size:
                lengths = {'first': [], 'heuristic': [length], 'bound': range(length + 1, limit + 1)}[early_stopping]
                hope = [live[g][0][1] / penalty(n, alpha, kind) for n in lengths]
                closed[g] = not any(value > finished[g][-1][0] for value in hope)
    return sorted(sum(finished, []), key=lambda answer: -answer[0])


def greedy(log_probs, eos_ids, limit: int) -> tuple[int, ...]:
    tokens = ()
    while len(tokens) < limit and (not tokens or tokens[-1] not in eos_ids):
        tokens += (int(np.argmax(log_probs(tokens))),)
    return tokens


def prompts(limits) -> dict[str, np.ndarray]:
    """Fields of a Prompt of one start token 0 per row."""
    limits = np.asarray(limits, np.int32)
    return {
        'tokens_RP': np.zeros((len(limits), 1), np.int32),
        'start_R': np.zeros(len(limits), np.int32),
        'limit_R': limits,
    }
