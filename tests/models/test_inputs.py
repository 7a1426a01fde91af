"""Ids outside the vocabulary and sequences past the table: errors which name both numbers, and never another row."""

import jax
import numpy as np
import pytest
from tiny_models import model_and_params, some_tokens, tiny

from transformer_jax.decoding.cache_api import init_cache, prefill, step
from transformer_jax.errors import UserError

SIX = tiny(kind='decoder', num_layers=1, max_positions=6)


@pytest.mark.parametrize('bad, message', [(23, 'token id 23 .* table of 23 rows'), (-1, 'token id -1 .* 23 rows')])
def test_an_id_outside_the_vocabulary_is_an_error_naming_both_numbers(bad, message):
    tokens = some_tokens(3, 6)
    tokens[1, 2] = bad
    model, params = model_and_params(tiny(kind='decoder', num_layers=1))
    for run in (
        lambda: model.apply({'params': params}, tokens),
        lambda: model.apply({'params': params}, tokens, cache=init_cache(model, 3, 8)),
        lambda: prefill(model, params, tokens, init_cache(model, 3, 8)),
    ):
        with pytest.raises(UserError, match=message):
            run()
    model, params = model_and_params(tiny(num_layers=1))
    for source, target in ((tokens, some_tokens(3, 6)), (some_tokens(3, 6), tokens)):
        with pytest.raises(UserError, match=message):
            model.apply({'params': params}, source, target)


def test_inside_jit_an_id_outside_the_vocabulary_gives_nan_and_never_another_row():
    model, params = model_and_params(tiny(kind='decoder', num_layers=1))
    run = jax.jit(lambda tokens: model.apply({'params': params}, tokens).logits)
    for bad in (23, -1, -100, 10**6):
        tokens = some_tokens(3, 6)
        tokens[1, 2] = bad
        logits = np.asarray(run(tokens))
        assert np.isnan(logits[1, 2:]).all()
        assert np.isfinite(logits[[0, 2]]).all()


@pytest.mark.parametrize('position', ['learned', 'sinusoidal'])
def test_six_positions_hold_six_tokens_and_not_seven(position):
    model, params = model_and_params(SIX.replace(position=position))
    logits = np.asarray(model.apply({'params': params}, some_tokens(3, 6)).logits)
    assert np.isfinite(logits).all()
    with pytest.raises(UserError, match='7 tokens is longer than max_positions = 6'):
        model.apply({'params': params}, some_tokens(3, 7))
    with pytest.raises(UserError, match='position 6 .* 6 rows'):
        model.apply({'params': params}, some_tokens(3, 6), positions=np.tile(np.arange(1, 7), (3, 1)))
    # Through the cache: three tokens of a prompt, three more, and then no seventh, though the cache has room.
    cache = init_cache(model, 3, 8)
    for size in (3, 1, 1, 1):
        cache = model.apply({'params': params}, some_tokens(3, size), cache=cache).cache
    for run in (
        lambda: model.apply({'params': params}, some_tokens(3, 1), cache=cache),
        lambda: step(model, params, some_tokens(3, 1), cache),
    ):
        with pytest.raises(UserError, match='position 6 .* 6 rows'):
            run()
    # Rotary and relative models have no such limit.
    free, _ = model_and_params(SIX.replace(position='rope', max_positions=None))
    assert np.isfinite(np.asarray(jax.jit(free.apply)({'params': params}, some_tokens(3, 7)).logits)).all()
