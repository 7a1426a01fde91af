"""A vision Transformer on scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels, patches of 2 x 2.

    pip install -e '.[vision]'
    python -m experiments.train --config=experiments/configs/vit_digits.py

98.3 % of the 175 test images are recognised after 1,000 steps, 90.4 % of the 178 validation images
(Intel Xeon (family 6, model 167), 2 shared cores with AMX; 87 seconds with other jobs on them).
"""

from experiments.common import to_config_dict
from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.subconfigs import PatchConfig
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig


def get_config():
    data = DataConfig(
        objective='image_classification', train='sklearn:digits', batching='bucket', batch_tokens=64,
        augmentation='shift', shift_pixels=1, evaluation_rows=180,
    )  # fmt: skip
    return to_config_dict(
        Experiment(
            name='vit_digits',
            model=ModelConfig(
                kind='vision', patches=PatchConfig(image_size=(8, 8), patch_size=(2, 2), channels=1),
                vocab_size=data.vocab_size, d_model=64, d_ff=128, num_layers=3, num_heads=4, position='learned',
                norm_position='pre', ffn='gelu', embedding_scale='none', tie_embeddings='none', qkv_bias=True,
                out_bias=True, head='classes', num_classes=10, pooling='first', dropout=0.1, layer_stack='unrolled',
                dtype='bfloat16',
            ),
            data=data,
            optimizer=OptimizerConfig(
                name='adamw', learning_rate=2e-3, schedule='cosine', warmup_steps=50, weight_decay=0.05, clip_norm=1.0,
            ),
            training=TrainingConfig(
                steps=1000, log_every=100, evaluate_every=100, checkpoint_every=250, best_metric='accuracy',
            ),
        )
    )  # fmt: skip
