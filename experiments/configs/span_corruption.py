"""T5's objective on one novel: an encoder reads a text with gaps, a decoder writes what stood in them.

    python -m experiments.train --config=experiments/configs/span_corruption.py

4.72 nats a target token on the test split (31.6 % right) and 4.74 on the validation split (31.1 %) after 1,000 steps
(AMD EPYC, family 25, model 17; one of its 2 cores, 2:06 minutes).
"""

from experiments.common import to_config_dict
from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig


def get_config():
    vocab_size = 2000
    return to_config_dict(
        Experiment(
            name='span_corruption',
            model=ModelConfig(
                vocab_size=vocab_size, d_model=128, d_ff=384, num_layers=3, num_heads=4, position='relative',
                norm='rms', norm_position='pre', ffn='gated_gelu_tanh', ffn_bias=False, embedding_scale='none',
                attention_scale=1.0, dropout=0.1, layer_stack='unrolled', dtype='bfloat16',
            ),
            data=DataConfig(
                objective='span_corruption', train='moby_dick', vocab_size=vocab_size, source_length=128,
                target_length=48, decoder_start='pad', batch_tokens=2112,
            ),
            optimizer=OptimizerConfig(
                name='adamw', learning_rate=3e-3, schedule='cosine', warmup_steps=100, weight_decay=0.1, clip_norm=1.0,
            ),
            training=TrainingConfig(
                steps=1000, log_every=50, evaluate_every=100, checkpoint_every=250, label_smoothing=0.0,
            ),
        )
    )  # fmt: skip
