"""What may influence what: causality by gradient, padding on either side, packed segments, rows without keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiny_models import model_and_params, some_tokens, tiny

from transformer_jax.config import POSITIONS

pytestmark = pytest.mark.usefixtures('quick_compilation')

LENGTH, WIDTH = 4, 6
SENTENCES = some_tokens(3, LENGTH)
OTHERS = some_tokens(3, LENGTH, seed=1)
# Padded on the right, on the left, and on both sides.
PLACES = np.array([[0, 1, 2, 3], [2, 3, 4, 5], [1, 2, 3, 4]])


def padded(sentences, places=PLACES, pad=0):
    tokens, mask = np.full((3, WIDTH), pad, np.int32), np.zeros((3, WIDTH), np.int32)
    np.put_along_axis(tokens, places, sentences, 1)
    np.put_along_axis(mask, places, 1, 1)
    return tokens, mask


def choices_of(position, kind):
    """Half of the schemes with a window and shared key heads beside, so that both kinds of layer are seen."""
    extra = {}
    if POSITIONS.index(position) % 2:
        extra = dict(layer_pattern=('local', 'global'), window=2, num_kv_heads=2)
    return tiny(kind=kind, position=position, **extra)


KINDS = [(position, 'decoder') for position in POSITIONS] + [
    ('sinusoidal', 'encoder'), ('alibi', 'encoder'), ('relative', 'encoder'),
    ('learned', 'encoder_decoder'), ('rope', 'encoder_decoder'), ('relative', 'encoder_decoder'),
]  # fmt: skip


@pytest.mark.parametrize('position, kind', KINDS)
def test_padding_on_either_side_equals_no_padding_and_its_ids_have_no_influence(position, kind):
    config = choices_of(position, kind)
    model, params = model_and_params(config)

    def run(sentences, others, **pad):
        tokens, mask = padded(sentences, **pad)
        if kind != 'encoder_decoder':
            return model.apply({'params': params}, tokens, mask=mask).logits
        # The other side of a pair is padded the other way round.
        targets, target_mask = padded(others, places=PLACES[::-1], **pad)
        return model.apply({'params': params}, tokens, targets, source_mask=mask, target_mask=target_mask).logits

    places = PLACES[::-1] if kind == 'encoder_decoder' else PLACES
    ours = np.take_along_axis(np.asarray(run(SENTENCES, OTHERS)), places[..., None], 1)
    inputs = (SENTENCES, OTHERS) if kind == 'encoder_decoder' else (SENTENCES,)
    alone = np.asarray(model.apply({'params': params}, *inputs).logits)
    np.testing.assert_allclose(ours, alone, atol=1e-5 * np.abs(alone).max())
    other_ids = np.take_along_axis(np.asarray(run(SENTENCES, OTHERS, pad=7)), places[..., None], 1)
    np.testing.assert_array_equal(ours, other_ids)


SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [3, 1, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]])


def alone_in_rows(tokens, segments):
    """Each segment in a row of its own, padded on the right: (tokens, mask, [(row, place) of each])."""
    rows = []
    for b in range(len(tokens)):
        for segment in sorted(set(segments[b]) - {0}):
            rows.append((b, np.flatnonzero(segments[b] == segment)))
    rows += rows[: -len(rows) % 3]
    out, mask = np.zeros((len(rows), WIDTH), np.int32), np.zeros((len(rows), WIDTH), np.int32)
    for row, (b, where) in enumerate(rows):
        out[row, : len(where)], mask[row, : len(where)] = tokens[b, where], 1
    return out, mask, rows


@pytest.mark.parametrize('position, kind', KINDS[:1] + KINDS[3:8] + KINDS[-2:])
def test_packed_segments_equal_each_alone(position, kind):
    config = choices_of(position, kind)
    model, params = model_and_params(config)
    tokens = some_tokens(3, WIDTH, seed=2)
    alone, mask, rows = alone_in_rows(tokens, SEGMENTS)
    if kind == 'encoder_decoder':
        # Each pair's source is its target's number of words read backwards, packed in another order of slots.
        sources, source_segments = tokens[:, ::-1], SEGMENTS[:, ::-1]
        packed = model.apply(
            {'params': params}, sources, tokens, source_segment_ids=source_segments, target_segment_ids=SEGMENTS
        ).logits
        first_appearance = [(b, WIDTH - 1 - where[::-1]) for b, where in rows]
        source_alone = np.zeros_like(alone)
        for row, (b, where) in enumerate(first_appearance):
            source_alone[row, : len(where)] = sources[b, where]
        arguments = [
            dict(source_tokens=source_alone[i : i + 3], target_tokens=alone[i : i + 3],
                 source_mask=mask[i : i + 3], target_mask=mask[i : i + 3])
            for i in range(0, len(alone), 3)
        ]  # fmt: skip
    else:
        packed = model.apply({'params': params}, tokens, segment_ids=SEGMENTS).logits
        arguments = [dict(tokens=alone[i : i + 3], mask=mask[i : i + 3]) for i in range(0, len(alone), 3)]
    singles = np.concatenate([np.asarray(model.apply({'params': params}, **some).logits) for some in arguments])
    for row, (b, where) in enumerate(rows):
        expected = singles[row, : len(where)]
        np.testing.assert_allclose(np.asarray(packed)[b, where], expected, atol=1e-5 * np.abs(expected).max())


def influence(config, arguments, **tokens):
    """|d logits at place i / d embedding of token j| for tokens, by table, which occur once each."""
    model, params = model_and_params(config)
    weight = jnp.asarray(np.random.default_rng(3).normal(size=config.vocab_size))

    def read(tables):
        changed = params | {name: {'embedding': table} for name, table in tables.items()}
        return model.apply({'params': changed}, **arguments).logits[0] @ weight

    jacobians = jax.jit(jax.jacrev(read))({name: params[name]['embedding'] for name in tokens})
    return [np.abs(np.asarray(jacobians[name]))[:, tokens[name]].sum(-1) for name in tokens]


ONCE = np.array([[3, 9, 1, 14, 6, 20]], np.int32)
SOURCES_ONCE = np.array([[2, 8, 5, 11, 17]], np.int32)


@pytest.mark.parametrize('name', ['layers_of_both_kinds', 'blockwise_with_a_prefix'])
def test_a_decoder_sees_exactly_what_came_before_by_gradient(name):
    config, arguments, expected = {
        'layers_of_both_kinds': (
            tiny(kind='decoder', position='rope', layer_pattern=('local', 'global'), window=2, num_kv_heads=2,
                 layer_stack='scan', tie_embeddings='none'),
            {}, oracles.triangle(6),
        ),
        'blockwise_with_a_prefix': (
            tiny(kind='decoder', position='alibi', num_layers=1, norm_position='parallel', tie_embeddings='none',
                 attention_backend='blockwise'),
            dict(prefix=np.array([3])), oracles.triangle(6, prefix=3),
        ),
    }[name]  # fmt: skip
    [found] = influence(config, dict(tokens=ONCE) | arguments, embedding=ONCE[0])
    assert (found[~expected] == 0).all()
    assert (found[expected] > 1e-5).all()


def test_a_translation_sees_its_whole_source_and_its_own_past_by_gradient():
    config = tiny(tie_embeddings='none', layer_stack='scan')
    arguments = dict(source_tokens=SOURCES_ONCE, target_tokens=ONCE, source_mask=np.array([[1, 1, 1, 1, 0]]))
    target, source = influence(config, arguments, target_embedding=ONCE[0], source_embedding=SOURCES_ONCE[0])
    assert (target[~oracles.triangle(6)] == 0).all() and (target[oracles.triangle(6)] > 1e-5).all()
    assert (source[:, 4] == 0).all() and (source[:, :4] > 1e-5).all()


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_sentence_of_padding_alone_gives_finite_gradients_and_changes_no_other(dtype):
    """The loss is taken on every row and place, padding too."""
    config = tiny(dtype=dtype, layer_stack='scan')
    model, params = model_and_params(config)
    source_mask = np.array([[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]])
    target_mask = np.array([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(params, on_all_rows, source, target):
        def total(params):
            out = model.apply({'params': params}, source, target, source_mask=source_mask, target_mask=target_mask)
            rows = out.logits if on_all_rows else out.logits[:2]
            return jnp.square(rows).mean(), out.logits

        return jax.grad(total, has_aux=True)(params)

    found, logits = gradient(params, True, SENTENCES, OTHERS)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves((found, logits)))
    changed = SENTENCES.copy()
    changed[2] = 5
    changed_logits = gradient(params, True, changed, OTHERS)[1]
    np.testing.assert_array_equal(np.asarray(logits)[:2], np.asarray(changed_logits)[:2])
