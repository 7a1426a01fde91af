"""A released encoder-decoder of 2017's make (post-norm, relu, learned positions) numbers an antibody with our layers.

anarcii's own program reads the chain, searches greedily and turns the answer into numbers; only the network is ours.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.decoding import init_cache, prefill, step
from transformer_jax.huggingface.plan import unflatten
from transformer_jax.models import abstract_params, build

pytestmark = pytest.mark.parity
torch = pytest.importorskip('torch')
anarcii = pytest.importorskip('anarcii')

# Heavy chain of trastuzumab (variable domain).
CHAIN = (
    'EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRY'
    'ADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS'
)
FILE = Path(anarcii.__file__).parent / 'models' / 'antibody' / 'antibody_4_2_128_512.pt'
ATTENTIONS = {
    'attention': 'self_attention.multihead_attn',
    'cross_attention': 'encoder_attention.multihead_attn',
}
NORMS = {
    'attention_residual': 'self_attn_layer_norm',
    'cross_attention_residual': 'enc_attn_layer_norm',
    'ffn_residual': 'ff_layer_norm',
}


def released():
    """Returns our model of the released sizes and its parameters."""
    sizes = json.loads(FILE.with_suffix('.json').read_text())
    width, heads = sizes['HID_DIM'], sizes['HEADS']
    tensors = {name: tensor.numpy() for name, tensor in torch.load(FILE, map_location='cpu', weights_only=True).items()}
    config = ModelConfig(
        vocab_size=sizes['OUTPUT_DIM'], d_model=width, d_ff=4 * width, num_layers=sizes['LAYERS'], num_heads=heads,
        position='learned', max_positions=len(tensors['encoder.pos_embedding.weight']), norm_epsilon=1e-5,
        qkv_bias=True, out_bias=True, tie_embeddings='none', logits_bias=True, dropout=0.0, layer_stack='unrolled',
    )  # fmt: skip
    proteins = tensors['encoder.tok_embedding.weight']
    leaves = {
        # Our two tables have as many rows; ids of the chain reach only those of the smaller.
        'source_embedding/embedding': np.pad(proteins, ((0, config.vocab_size - len(proteins)), (0, 0))),
        'target_embedding/embedding': tensors['decoder.tok_embedding.weight'],
        'head/output/kernel': tensors['decoder.fc_out.weight'].T,
        'head/bias': tensors['decoder.fc_out.bias'],
    }
    for stack in ('encoder', 'decoder'):
        leaves[f'{stack}_embedder/position/embedding'] = tensors[f'{stack}.pos_embedding.weight']
        for i in range(config.num_layers):
            ours, theirs = f'{stack}/layers_{i}', f'{stack}.layers.{i}'
            for name, module in ATTENTIONS.items():
                if f'{theirs}.{module}.in_proj_weight' not in tensors:
                    continue
                kernels = np.split(tensors[f'{theirs}.{module}.in_proj_weight'], 3)
                biases = np.split(tensors[f'{theirs}.{module}.in_proj_bias'], 3)
                for part, kernel, bias in zip(('query', 'key', 'value'), kernels, biases, strict=True):
                    leaves[f'{ours}/{name}/{part}/kernel'] = kernel.T.reshape(width, heads, -1)
                    leaves[f'{ours}/{name}/{part}/bias'] = bias.reshape(heads, -1)
                leaves[f'{ours}/{name}/out/kernel'] = tensors[f'{theirs}.{module}.out_proj.weight'].T.reshape(
                    heads, -1, width
                )
                leaves[f'{ours}/{name}/out/bias'] = tensors[f'{theirs}.{module}.out_proj.bias']
            for name, layer in (('up', 'fc_1'), ('down', 'fc_2')):
                module = f'{theirs}.positionwise_feedforward.{layer}'
                leaves[f'{ours}/ffn/{name}/kernel'] = tensors[f'{module}.weight'].T
                leaves[f'{ours}/ffn/{name}/bias'] = tensors[f'{module}.bias']
            for name, module in NORMS.items():
                if f'{theirs}.{module}.weight' in tensors and not (stack == 'encoder' and 'cross' in name):
                    leaves[f'{ours}/{name}/out_norm/scale'] = tensors[f'{theirs}.{module}.weight']
                    leaves[f'{ours}/{name}/out_norm/bias'] = tensors[f'{theirs}.{module}.bias']
    model, params = build(config), unflatten(leaves)
    shapes, _ = abstract_params(model)
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    return model, params


class Network:
    """Stands where anarcii expects its network: reads a source once, then a token at a time from our cache."""

    def __init__(self):
        self.model, self.params = released()
        self.steps = 0

    def make_src_mask(self, source):
        return source == 0

    def make_trg_mask(self, target):
        return target == 0, None

    def encoder(self, source, padding):
        return source.numpy(), ~padding.numpy()

    def decoder(self, tokens, source, padding, causal, source_padding, cache):
        tokens = tokens.numpy().astype(np.int32)
        if cache is None:
            (source, mask), rows = source, len(tokens)
            cache = init_cache(self.model, rows, source.shape[1] + 1, source.astype(np.int32), mask)
            logits, cache = prefill(self.model, self.params, tokens, cache)
        else:
            logits, cache = step(self.model, self.params, tokens, cache)
        self.steps += 1
        return torch.tensor(np.asarray(logits)), cache


def test_the_numbering_of_an_antibody_is_that_of_the_package(monkeypatch):
    def number():
        program = anarcii.Anarcii(seq_type='antibody', mode='accuracy', cpu=True, ncpu=1)
        (answer,) = program.number(CHAIN).values()
        return answer

    expected, network = number(), Network()
    monkeypatch.setattr('anarcii.inference.model_runner.ModelRunner._load_model', lambda runner: network)
    found = number()
    # One step for each residue, and for the chain's type, start and end.
    assert network.steps >= len(CHAIN)
    assert expected['chain_type'] == 'H' and expected['error'] is None
    residues = ''.join(residue for _, residue in found['numbering'] if residue != '-')
    assert residues == CHAIN and dict(found['numbering'])[(23, ' ')] == 'C' == dict(found['numbering'])[(104, ' ')]
    assert found['numbering'] == expected['numbering'] and found['chain_type'] == expected['chain_type']
    # The score is the mean of the chosen logits, of about 20.
    assert found['score'] == pytest.approx(expected['score'], abs=1e-4)
