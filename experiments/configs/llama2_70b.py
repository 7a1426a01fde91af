"""LLaMA-2-70B (Touvron et al. 2023) on 256 chips; all else as in llama2_7b.py."""

from experiments.configs import llama2_7b


def get_config():
    return llama2_7b.get_config('llama2_70b', chips=256)
