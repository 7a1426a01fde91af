"""Tensors which are functions of the config: what a file should hold if it holds them at all."""

from __future__ import annotations

import numpy as np

from transformer_jax.config import ModelConfig, rotary_width
from transformer_jax.ops import rope


def counting(config: ModelConfig, shape: tuple[int, ...]) -> np.ndarray:
    """position_ids: 0, 1, 2 ... in every row."""
    return np.broadcast_to(np.arange(shape[-1]), shape)


def causal(config: ModelConfig, shape: tuple[int, ...]) -> np.ndarray:
    """attn.bias: a lower triangle of ones."""
    return np.broadcast_to(np.tril(np.ones(shape[-2:])), shape)


def inverse_frequencies(config: ModelConfig, shape: tuple[int, ...]) -> np.ndarray:
    """inv_freq: angles per position, as files of old versions hold them, before any scaling."""
    return rope.frequencies(rotary_width(config), config.rope_theta)[0]


def sinusoids(config: ModelConfig, shape: tuple[int, ...]) -> np.ndarray:
    """embed_positions of Marian and Pegasus: all sines, then all cosines."""
    angles = np.arange(shape[0])[:, None] * 10000.0 ** (-np.arange(0, shape[1], 2) / shape[1])
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def zeros(config: ModelConfig, shape: tuple[int, ...]) -> np.ndarray:
    """Tables of zeros."""
    return np.zeros(shape)
