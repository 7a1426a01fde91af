"""Hugging Face's `generate` as a contestant; and the random models, in the formats of all contestants.

The only importer of torch and transformers among the decoding benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ctranslate2
import numpy as np
import torch
import transformers

from benchmarks.decoding_jobs import SHAPES, Job, ModelShape

_TRANSLATION = dict(
    d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8,
    encoder_ffn_dim=2048, decoder_ffn_dim=2048, activation_function='relu', scale_embedding=True, dropout=0.0,
    max_position_embeddings=512, forced_eos_token_id=None, init_std=0.06,
)  # fmt: skip
_LLAMA = dict(
    hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
    max_position_embeddings=2048, tie_word_embeddings=False,
)  # fmt: skip


class _Vocabulary:
    """What CTranslate2's converter asks a tokenizer for; a word is the name of its id."""

    eos_token, unk_token, bos_token = '</s>', '<unk>', '<s>'

    def __init__(self, shape: ModelShape):
        self._words = words(shape)

    def get_vocab(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self._words)}


class _Converter(ctranslate2.converters.TransformersConverter):
    def __init__(self, folder: Path, shape: ModelShape):
        super().__init__(str(folder))
        self._vocabulary = _Vocabulary(shape)

    def load_tokenizer(self, *unused_arguments, **unused_options) -> _Vocabulary:
        return self._vocabulary


def words(shape: ModelShape) -> list[str]:
    """Returns the word of each id, as CTranslate2 takes them; the last id of a translation model is its padding."""
    names = {0: '<s>', 1: '<unk>', shape.eos_id: '</s>'} | ({shape.vocab_size - 1: '<pad>'} if shape.source else {})
    return [names.get(index, f'w{index}') for index in range(shape.vocab_size)]


def write_model(name: str, folder: Path) -> None:
    """Writes a model with random weights, the same for all: `folder`/huggingface and `folder`/ctranslate2."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    if name == 'translation':
        pad = shape.vocab_size - 1
        config = transformers.MarianConfig(
            vocab_size=shape.vocab_size, pad_token_id=pad, decoder_start_token_id=pad, eos_token_id=shape.eos_id,
            **_TRANSLATION,
        )  # fmt: skip
        model = transformers.MarianMTModel(config)
        # CTranslate2 starts from a zero embedding and cannot generate padding: so do and so cannot the others.
        model.model.shared.weight.data[pad] = 0
        model.final_logits_bias[:, pad] = -1e9
        _vary(model.model.decoder.layers[-1].final_layer_norm)
    elif name == 'gpt2':
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        _vary(model.transformer.ln_f)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=shape.vocab_size, **_LLAMA))
    model.save_pretrained(folder / 'huggingface')
    _Converter(folder / 'huggingface', shape).convert(str(folder / 'ctranslate2'))


def _vary(norm: torch.nn.LayerNorm) -> None:
    """Draws the last norm's scale: with ones, a tied output matrix would answer each token with itself."""
    torch.nn.init.normal_(norm.weight)


def make_generate(job: Job, precision: str, folder: Path) -> tuple[Callable[[], np.ndarray], dict]:
    """Returns `run() -> best tokens (batch, new tokens)` and facts."""
    shape = SHAPES[job.shape]
    auto = transformers.AutoModelForSeq2SeqLM if shape.source else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder / 'huggingface', dtype=getattr(torch, precision)).eval()
    inputs = torch.tensor(job.inputs()).long()
    options = dict(
        max_new_tokens=shape.new_tokens, min_new_tokens=shape.new_tokens, num_beams=job.beams, do_sample=False,
        attention_mask=torch.ones_like(inputs), pad_token_id=shape.vocab_size - 1 if shape.source else shape.eos_id,
    )  # fmt: skip

    def run() -> np.ndarray:
        with torch.inference_mode():
            return model.generate(inputs, **options)[:, -shape.new_tokens :].numpy()

    return run, {'versions': {'torch': torch.__version__, 'transformers': transformers.__version__}}
