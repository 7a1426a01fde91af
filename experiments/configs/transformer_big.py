"""The big model of Vaswani et al. 2017, table 3, on WMT 2014 English to German (section 5)."""

from experiments.common import to_config_dict
from transformer_jax.data.config import DataConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.presets import preset
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig


def get_config():
    return to_config_dict(
        Experiment(
            name='transformer_big',
            model=preset('transformer_big'),
            data=DataConfig(
                train='tfds:wmt14_translate/de-en', direction='reverse', vocab_size=37000, source_length=128,
                target_length=128, batch_tokens=51200,
            ),
            optimizer=OptimizerConfig(),
            training=TrainingConfig(
                steps=300_000, evaluate_every=5000, checkpoint_every=1500, keep=20, average_last=20
            ),
            decode=DecodeConfig(beam_size=4, max_new_tokens_over_source=50),
        )
    )  # fmt: skip
