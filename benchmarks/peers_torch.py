"""The contestants written by others: Hugging Face Marian and torch's nn.Transformer, same dimensions, same batches.

Dropout, where it is asked for, stands in the paper's places only (each sublayer's output; embedding + position), so
that all contestants draw the same number of random bits. This file is the only importer of torch and transformers here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import transformers
from torch import nn

from benchmarks.shapes import Shapes, make_batches


class TorchTransformer(nn.Module):
    """nn.Transformer with embeddings scaled by sqrt(D), sinusoids, one matrix for both embeddings and the logits."""

    def __init__(self, shapes: Shapes, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(shapes.vocab_size, shapes.d_model)
        nn.init.normal_(self.embedding.weight, std=shapes.d_model**-0.5)
        self.dropout = nn.Dropout(dropout)
        layers = shapes.num_layers
        self.transformer = nn.Transformer(
            shapes.d_model, shapes.num_heads, layers, layers, shapes.d_ff, dropout, batch_first=True
        )
        for layer in [*self.transformer.encoder.layers, *self.transformer.decoder.layers]:
            layer.dropout.p = 0.0  # inside the feed-forward network
            layer.self_attn.dropout = 0.0
        for layer in self.transformer.decoder.layers:
            layer.multihead_attn.dropout = 0.0
        length = max(shapes.source_length, shapes.target_length)
        self.register_buffer('positions', torch.tensor(_sinusoids(length, shapes.d_model)))
        self.register_buffer('causal', nn.Transformer.generate_square_subsequent_mask(shapes.target_length))

    def forward(self, source_BS: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
        """Returns logits_BTV."""
        source_BSD, target_BTD = self._embed(source_BS), self._embed(target_BT)
        hidden_BTD = self.transformer(source_BSD, target_BTD, tgt_mask=self.causal, tgt_is_causal=True)
        return nn.functional.linear(hidden_BTD, self.embedding.weight)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        scaled = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)
        return self.dropout(scaled + self.positions[: tokens.shape[1]])


def make_marian(shapes: Shapes, dropout: float) -> nn.Module:
    """Returns Marian with the paper's dimensions, weights tied three ways."""
    config = transformers.MarianConfig(
        vocab_size=shapes.vocab_size,
        d_model=shapes.d_model,
        encoder_layers=shapes.num_layers,
        decoder_layers=shapes.num_layers,
        encoder_attention_heads=shapes.num_heads,
        decoder_attention_heads=shapes.num_heads,
        encoder_ffn_dim=shapes.d_ff,
        decoder_ffn_dim=shapes.d_ff,
        dropout=dropout,
        activation_function='relu',
        scale_embedding=True,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=1,
        forced_eos_token_id=1,
        use_cache=False,
    )
    return transformers.MarianMTModel(config)


def make_step(name: str, precision: str, dropout: float, shapes: Shapes, compiled: bool) -> tuple[Callable, dict]:
    """Returns `run_step(i) -> loss` and facts for the contestant `name`, one of `marian`, `torch`.

    Args:
      precision: `float32`, or `bfloat16` for torch's CPU autocast with fp32 parameters.
      compiled: wraps the model in torch.compile.
    """
    torch.manual_seed(0)
    model = make_marian(shapes, dropout) if name == 'marian' else TorchTransformer(shapes, dropout)
    model.train()
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    optimizer = torch.optim.Adam(model.parameters(), lr=shapes.learning_rate, betas=(0.9, 0.98), eps=1e-9, fused=True)
    forward = torch.compile(model) if compiled else model
    batches = [{key: torch.tensor(value).long() for key, value in batch.items()} for batch in make_batches(shapes)]

    def run_step(step: int) -> float:
        batch = batches[step % len(batches)]
        with torch.autocast('cpu', torch.bfloat16, enabled=precision == 'bfloat16'):
            if name == 'marian':
                logits_BTV = forward(input_ids=batch['source'], decoder_input_ids=batch['target']).logits
            else:
                logits_BTV = forward(batch['source'], batch['target'])
            loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), batch['labels'].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    versions = {'torch': torch.__version__, 'transformers': transformers.__version__}
    return run_step, {'parameters': parameters, 'threads': torch.get_num_threads(), 'versions': versions}


def _sinusoids(length: int, width: int) -> np.ndarray:
    angles = np.arange(length)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, width).astype(np.float32)
