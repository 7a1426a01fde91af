"""Evaluation counts every example once; scores are sacreBLEU's on plain text."""

import jax
import numpy as np
import pytest
from toy_training import tiny_experiment, write_pairs

from transformer_jax.data.objectives import make_objective
from transformer_jax.data.sources import open_source
from transformer_jax.data.tokenizers import open_tokenizer
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.errors import UserError
from transformer_jax.models import build, init_params
from transformer_jax.sharding import MeshConfig, make_mesh
from transformer_jax.training.evaluation import Evaluator
from transformer_jax.training.scores import score
from transformer_jax.training.translate import translate


@pytest.fixture(scope='module')
def parts(tmp_path_factory):
    directory = tmp_path_factory.mktemp('evaluation')
    experiment = tiny_experiment(directory, model={'layer_stack': 'unrolled'})
    tokenizer = open_tokenizer(experiment.data, open_source(experiment.data.train), directory)
    model = build(experiment.model)
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(3))
    return experiment.data, tokenizer, model, params


def evaluator(parts, rows):
    data, tokenizer, model, _ = parts
    data = data.replace(evaluation_rows=rows)
    decode = DecodeConfig(max_new_tokens=4)
    return Evaluator(
        model, tokenizer, make_objective(data, tokenizer), data, decode, make_mesh(MeshConfig(), jax.devices()[:1])
    )


def test_loss_counts_ten_examples_once_for_any_batch_size(parts, tmp_path):
    source = open_source(write_pairs(tmp_path / 'ten.tsv', 10, seed=5))
    found = [evaluator(parts, rows).loss(parts[3], source) for rows in (4, 10)]
    for one in found:
        assert one['examples'] == 10
        assert one['tokens'] == found[0]['tokens']
        assert one['loss'] == pytest.approx(found[0]['loss'], rel=1e-6)
        assert one['accuracy'] == pytest.approx(found[0]['accuracy'])
        assert one['perplexity'] == pytest.approx(np.exp(one['loss']))


def test_loss_is_that_of_each_sentence_alone(parts, tmp_path):
    data, tokenizer, model, params = parts
    source = open_source(write_pairs(tmp_path / 'two.tsv', 2, seed=6))
    total = tokens = 0
    for pair in (source[index] for index in range(2)):
        inputs = np.array([tokenizer.encode(pair['source']) + [tokenizer.eos_id]])
        labels = tokenizer.encode(pair['target']) + [tokenizer.eos_id]
        decoder = np.array([[tokenizer.bos_id, *labels[:-1]]])
        logits = np.asarray(model.apply({'params': params}, source_tokens=inputs, target_tokens=decoder).logits[0])
        log_probs = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
        total -= log_probs[np.arange(len(labels)), labels].sum()
        tokens += len(labels)
    found = evaluator(parts, 4).loss(params, source)
    assert found['tokens'] == tokens
    assert found['loss'] == pytest.approx(total / tokens, rel=1e-5)


def test_translations_come_in_order_whatever_the_batch_and_survive_empty_and_long_lines(parts, caplog):
    data, tokenizer, model, params = parts
    lines = ['open the file', '', 'save a page in the table of the dialog', '   ', 'close', 'x ' * 400, 'print']
    options = {'longest': 16, 'config': DecodeConfig(max_new_tokens=4, beam_size=2, num_return=2, eos_ids=(1,),
                                                     decoder_start_id=tokenizer.bos_id)}  # fmt: skip
    done = []
    batched = translate(model, params, tokenizer, lines, rows=4, progress=done.append, **options)
    assert sum(done) == len(lines) and len(batched) == len(lines)
    assert '2 of 7 lines are longer than 16 tokens and were cut' in caplog.text
    for index in (0, 4):
        (alone,) = translate(model, params, tokenizer, [lines[index]], rows=4, **options)
        assert [answer.text for answer in alone] == [answer.text for answer in batched[index]]
        assert alone[0].score == pytest.approx(batched[index][0].score, abs=1e-4)
    assert [answer.text for answer in batched[1]] == ['', ''] and batched[3][0].text == ''
    assert all(len(answers) == 2 and '\n' not in answers[0].text for answers in batched)


def test_scores_are_sacrebleus_on_detokenised_text_with_its_signature():
    split, joined = "It costs $ 5.00 , is n't it ?", "It costs $5.00, isn't it?"
    assert score([split], [joined]).bleu == pytest.approx(51.3345, abs=1e-4)
    whole = score([joined], [joined])
    assert whole.bleu == pytest.approx(100) and whole.chrf == pytest.approx(100)
    assert 'tok:13a' in whole.bleu_signature and 'version:' in whole.bleu_signature
    assert 'case:lc' in whole.bleu_lowercase_signature and 'nc:6' in whole.chrf_signature
    assert score([joined.upper()], [joined]).bleu_lowercase == pytest.approx(100)


def test_a_count_which_does_not_match_is_refused():
    with pytest.raises(UserError, match='1 translations but 2 references'):
        score(['a'], ['a', 'b'])
