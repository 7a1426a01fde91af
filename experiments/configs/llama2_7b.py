"""LLaMA-2-7B (Touvron et al. 2023) on 64 chips, one sequence of 4096 tokens on each, parameters split over all.

The text and the vocabulary are given on the command line:

    python -m experiments.train --config=experiments/configs/llama2_7b.py --config.data.train=text:FILE#split
        --config.data.tokenizer=tokenizer.model
"""

from experiments.common import to_config_dict
from transformer_jax.data.config import DataConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.presets import preset
from transformer_jax.sharding import MeshConfig
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig


def get_config(model='llama2_7b', chips=64, remat='full'):
    length = 4096
    return to_config_dict(
        Experiment(
            name=model,
            model=preset(model, dtype='bfloat16', remat=remat),
            data=DataConfig(
                objective='causal_lm', train='text:train.txt#split', vocab_size=32000, target_length=length,
                batch_tokens=chips * length, row_multiple=chips, evaluation_rows=chips,
            ),
            optimizer=OptimizerConfig(
                name='adamw', learning_rate=3e-4, schedule='cosine', warmup_steps=2000, final_fraction=0.1, b2=0.95,
                eps=1e-5, weight_decay=0.1, clip_norm=1.0,
            ),
            training=TrainingConfig(steps=500_000, label_smoothing=0.0),
            decode=DecodeConfig(max_new_tokens=256),
            mesh=MeshConfig(data=1, fsdp=-1),
        )
    )  # fmt: skip
