"""A run of a sweep: 600 steps of 1,024 token slots on the embedded software texts, about a minute on 2 CPU cores."""

from experiments.common import to_config_dict
from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig


def get_config():
    vocab_size = 2000
    return to_config_dict(
        Experiment(
            name='ablation',
            model=ModelConfig(
                vocab_size=vocab_size, d_model=64, d_ff=256, num_layers=2, num_heads=4, norm_position='pre',
                dropout=0.0, layer_stack='unrolled',
            ),
            data=DataConfig(vocab_size=vocab_size, batch_tokens=1024, test='none', evaluation_limit=300),
            optimizer=OptimizerConfig(learning_rate=5e-3, schedule='cosine', warmup_steps=100, clip_norm=1.0),
            training=TrainingConfig(steps=600, evaluate_every=100, checkpoint_every=300, keep=1),
            decode=DecodeConfig(beam_size=2, max_new_tokens_over_source=20, early_stopping='heuristic'),
        )
    )  # fmt: skip
