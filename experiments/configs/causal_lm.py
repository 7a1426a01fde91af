"""A decoder of today's make (rotary positions, RMS norms, gated silu) as a causal language model of one novel.

    python -m experiments.train --config=experiments/configs/causal_lm.py

2.55 bits a byte on the test split and 2.42 on the validation split after 1,000 steps (AMD EPYC, family 25, model 17;
one of its 2 cores, shared with other jobs; 6:13 minutes).

Another text by --config.data.train=text:FILE#split, which parts it into training, validation and test.
"""

from experiments.common import to_config_dict
from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig


def get_config():
    vocab_size = 2000
    return to_config_dict(
        Experiment(
            name='causal_lm',
            model=ModelConfig(
                kind='decoder', vocab_size=vocab_size, d_model=128, d_ff=384, num_layers=4, num_heads=4,
                position='rope', norm='rms', norm_position='pre', ffn='gated_silu', ffn_bias=False,
                embedding_scale='none', tie_embeddings='output', dropout=0.2, layer_stack='unrolled',
                dtype='bfloat16',
            ),
            data=DataConfig(
                objective='causal_lm', train='moby_dick', vocab_size=vocab_size, target_length=256, batch_tokens=2048,
            ),
            optimizer=OptimizerConfig(
                name='adamw', learning_rate=3e-3, schedule='cosine', warmup_steps=100, weight_decay=0.1, clip_norm=1.0,
            ),
            training=TrainingConfig(
                steps=1000, evaluate_every=100, checkpoint_every=250, label_smoothing=0.0, log_every=50,
            ),
            decode=DecodeConfig(max_new_tokens=60, sample=True, temperature=0.8, top_p=0.95),
        )
    )  # fmt: skip
