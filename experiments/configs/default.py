"""The main job: English to German on the embedded software texts, in 15 minutes on 2 CPU cores."""

from experiments.common import to_config_dict
from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig


def get_config():
    vocab_size = 4000
    return to_config_dict(
        Experiment(
            name='default',
            model=ModelConfig(
                vocab_size=vocab_size, d_model=192, d_ff=768, num_layers=3, num_heads=6, norm_position='pre'
            ),
            data=DataConfig(vocab_size=vocab_size, batch_tokens=6144),
            optimizer=OptimizerConfig(learning_rate=2e-3, schedule='cosine', warmup_steps=300, clip_norm=1.0),
            training=TrainingConfig(steps=2500, evaluate_every=250, bleu_every=500, checkpoint_every=250),
            decode=DecodeConfig(beam_size=4, max_new_tokens_over_source=50),
        )
    )
