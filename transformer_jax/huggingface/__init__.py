"""Hugging Face checkpoints, both ways, without torch: config.json and safetensors, a weight table per family."""

from transformer_jax.huggingface.families import FAMILIES
from transformer_jax.huggingface.load import load_pretrained, pretrained_config
from transformer_jax.huggingface.save import save_pretrained

__all__ = ['FAMILIES', 'load_pretrained', 'pretrained_config', 'save_pretrained']
