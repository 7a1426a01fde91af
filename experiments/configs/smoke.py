"""The whole path in under a minute: train, save, evaluate, translate and draw on a slice of the embedded texts."""

from experiments.common import to_config_dict
from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig


def get_config():
    vocab_size = 700
    return to_config_dict(
        Experiment(
            name='smoke',
            model=ModelConfig(
                vocab_size=vocab_size, d_model=64, d_ff=128, num_layers=2, num_heads=4, norm_position='pre', dropout=0.0
            ),
            data=DataConfig(
                vocab_size=vocab_size, limit=2000, evaluation_limit=64, source_length=48, target_length=48,
                batch_tokens=1536,
            ),
            optimizer=OptimizerConfig(learning_rate=1.0, warmup_steps=60),
            training=TrainingConfig(
                steps=120, log_every=20, evaluate_every=60, bleu_every=120, bleu_sentences=16, checkpoint_every=40,
                average_last=2,
            ),
            decode=DecodeConfig(beam_size=2, max_new_tokens_over_source=10),
        )
    )  # fmt: skip
