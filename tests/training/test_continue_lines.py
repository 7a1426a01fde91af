"""A causal language model goes on writing each line, whatever the other lines of its batch."""

import jax
import numpy as np
import pytest
from tiny_models import model_and_params
from toy_training import WORDS

from transformer_jax.config import ModelConfig
from transformer_jax.data.tokenizers import train_tokenizer
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.training.translate import continue_lines

LINES = ['open the file', '', 'a', 'close a page of the table']
NEW = 5


@pytest.fixture(scope='module')
def parts(tmp_path_factory):
    tokenizer = train_tokenizer([' '.join(WORDS)] * 3, 290, tmp_path_factory.mktemp('vocabulary'))
    config = ModelConfig(
        kind='decoder', vocab_size=290, d_model=16, d_ff=32, num_layers=1, num_heads=2, position='rope', norm='rms',
        norm_position='pre', tie_embeddings='none', dropout=0.0, layer_stack='unrolled',
    )  # fmt: skip
    return tokenizer, *model_and_params(config)


def _greedy(parts, prompt):
    """The most likely token after the whole of what stands there, again and again, without a cache."""
    tokenizer, model, params = parts
    forward = jax.jit(lambda tokens: model.apply({'params': params}, tokens).logits)
    tokens = list(prompt)
    for _ in range(NEW):
        padded = np.full((1, 64), tokenizer.pad_id, np.int32)
        padded[0, : len(tokens)] = tokens  # Padding comes later, where a causal model does not look.
        tokens.append(int(np.argmax(np.asarray(forward(padded))[0, len(tokens) - 1])))
        if tokens[-1] == tokenizer.eos_id:
            break
    return [token for token in tokens[len(prompt) :] if token != tokenizer.eos_id]


def _written(parts, lines, **choices):
    tokenizer, model, params = parts
    decode = DecodeConfig(
        max_new_tokens=NEW, eos_ids=(tokenizer.eos_id,), pad_id=tokenizer.pad_id, decoder_start_id=tokenizer.bos_id
    )
    heard = []
    answers = continue_lines(
        model, params, tokenizer, lines, decode,
        **{'longest': 64, 'rows': 2, 'progress': heard.append, **choices},
    )  # fmt: skip
    assert sum(heard) == len(lines)
    return [answer.text for (answer,) in answers]


def _one_line(text):
    return ' '.join(text.splitlines())


def test_each_line_goes_on_with_what_is_most_likely_after_it(parts):
    tokenizer = parts[0]
    expected = []
    for line in LINES:
        ids = tokenizer.encode(line)
        expected.append(_one_line(tokenizer.decode([*ids, *_greedy(parts, [tokenizer.bos_id, *ids])])))
    assert _written(parts, LINES) == expected
    assert all(text.startswith(line) and text != line for text, line in zip(expected, LINES, strict=True))


def test_of_a_line_which_is_too_long_the_end_is_read_and_the_whole_is_written(parts, caplog):
    tokenizer = parts[0]
    ids = tokenizer.encode(LINES[-1])
    longest = len(ids) - 2
    expected = _one_line(tokenizer.decode([*ids, *_greedy(parts, [tokenizer.bos_id, *ids[-(longest - 1) :]])]))
    assert _written(parts, LINES[-1:], longest=longest) == [expected]
    assert '1 of 1 lines are longer' in caplog.text
    assert _written(parts, ['a', LINES[-1]], longest=longest, too_long='skip')[1] == ''
