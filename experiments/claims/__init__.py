"""Claims about the Transformer, each measured by one small file: python -m experiments.claims."""

# In the order of the page.
CLAIMS = (
    'scale',
    'equivariance',
    'gradients_by_layer',
    'teacher_forcing',
    'cache_time',
    'latent_cache',
    'blockwise',
    'padding',
    'lstm',
    'remat',
    'bf16',
    'ntk',
    'head_variety',
    'warm_up',
    'head_count',
    'key_width',
    'regularisation',
    'lengths',
    'quantized',
)
