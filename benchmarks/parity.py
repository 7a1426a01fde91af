"""Tiny random models of transformers, and how far ours are from them: one case per family and variant."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.huggingface import FAMILIES, load_pretrained, save_pretrained
from transformer_jax.huggingface.plan import flatten, full_name, make_plan
from transformer_jax.models import unroll_params

V, T, S = 61, 11, 9

# Each program runs once on a tiny model, so compiling is what takes the time.
_COMPILE_FAST = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of transformers.

    Attributes:
      name: of the case; family: its model_type.
      architecture: class name in transformers.
      fields: of its config.
      padding: side on which the second row is padded, 'right', 'left' or 'none'.
    """

    name: str
    family: str
    architecture: str
    fields: dict[str, Any]
    padding: str = 'right'


_LLAMA = dict(vocab_size=V, hidden_size=24, intermediate_size=20, num_hidden_layers=3, num_attention_heads=6,
              num_key_value_heads=2, max_position_embeddings=64, head_dim=6, pad_token_id=0)  # fmt: skip
_ROPE = dict(rope_theta=500.0, factor=4.0)
_OLMO = {name: value for name, value in _LLAMA.items() if name != 'head_dim'}
_GPT2 = dict(vocab_size=V, n_positions=16, n_embd=24, n_layer=3, n_head=3, n_inner=20)
_NEOX = dict(vocab_size=V, hidden_size=24, intermediate_size=20, num_hidden_layers=3, num_attention_heads=3,
             max_position_embeddings=64)  # fmt: skip
_BART = dict(vocab_size=V, d_model=24, encoder_layers=2, decoder_layers=3, encoder_ffn_dim=20, decoder_ffn_dim=20,
             encoder_attention_heads=3, decoder_attention_heads=3, max_position_embeddings=16, pad_token_id=0,
             bos_token_id=1, eos_token_id=2, forced_eos_token_id=2, decoder_start_token_id=2)  # fmt: skip
_T5 = dict(vocab_size=V, d_model=24, d_kv=5, d_ff=20, num_layers=2, num_decoder_layers=3, num_heads=3,
           relative_attention_num_buckets=8, relative_attention_max_distance=9, decoder_start_token_id=0)  # fmt: skip
_DEEPSEEK = dict(vocab_size=V, hidden_size=24, intermediate_size=20, moe_intermediate_size=12, num_hidden_layers=3,
                 num_attention_heads=3, num_key_value_heads=3, n_shared_experts=2, num_experts_per_tok=2,
                 first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=9, qk_rope_head_dim=4, qk_nope_head_dim=6,
                 v_head_dim=5, max_position_embeddings=64, pad_token_id=0)  # fmt: skip
_VIT = dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=20, image_size=9,
            patch_size=3, num_channels=2, num_labels=3)  # fmt: skip
_BERT = dict(vocab_size=V, hidden_size=24, num_hidden_layers=3, num_attention_heads=3, intermediate_size=20,
             max_position_embeddings=16, type_vocab_size=3, num_labels=3)  # fmt: skip
_MODERN = dict(vocab_size=V, hidden_size=24, intermediate_size=20, num_hidden_layers=5, num_attention_heads=3,
               local_attention=6, pad_token_id=0, eos_token_id=1, bos_token_id=2, cls_token_id=2, sep_token_id=1,
               num_labels=3)  # fmt: skip

CASES = (
    Case('llama', 'llama', 'LlamaForCausalLM', _LLAMA),
    Case('llama bare', 'llama', 'LlamaModel', _LLAMA),
    Case('llama biases, tied, linear', 'llama', 'LlamaForCausalLM', _LLAMA | dict(
        num_attention_heads=3, num_key_value_heads=1, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        rope_parameters=_ROPE | dict(rope_type='linear')), 'left'),
    Case('llama dynamic', 'llama', 'LlamaForCausalLM', _LLAMA | dict(
        max_position_embeddings=7, rope_parameters=_ROPE | dict(rope_type='dynamic')), 'none'),
    Case('llama yarn', 'llama', 'LlamaForCausalLM', _LLAMA | dict(
        rope_parameters=_ROPE | dict(rope_type='yarn', original_max_position_embeddings=7, beta_fast=4.0))),
    Case('llama llama3', 'llama', 'LlamaForCausalLM', _LLAMA | dict(rope_parameters=_ROPE | dict(
        rope_type='llama3', original_max_position_embeddings=7, low_freq_factor=0.5, high_freq_factor=2.0))),
    Case('mistral', 'mistral', 'MistralForCausalLM', _LLAMA | dict(sliding_window=4), 'left'),
    Case('mixtral', 'mixtral', 'MixtralForCausalLM', _LLAMA | dict(num_local_experts=5, num_experts_per_tok=2), 'left'),
    Case('mixtral window', 'mixtral', 'MixtralForCausalLM', _LLAMA | dict(
        num_local_experts=3, num_experts_per_tok=1, sliding_window=4, tie_word_embeddings=True)),
    Case('qwen2', 'qwen2', 'Qwen2ForCausalLM', {k: v for k, v in _LLAMA.items() if k != 'head_dim'} | dict(
        use_sliding_window=True, sliding_window=4, max_window_layers=1, tie_word_embeddings=True)),
    Case('qwen3', 'qwen3', 'Qwen3ForCausalLM', _LLAMA | dict(head_dim=10, attention_bias=True), 'left'),
    Case('gemma2', 'gemma2', 'Gemma2ForCausalLM', _LLAMA | dict(
        sliding_window=4, query_pre_attn_scalar=7, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    Case('olmo2', 'olmo2', 'Olmo2ForCausalLM', _OLMO | dict(attention_bias=True), 'left'),
    Case('gpt2', 'gpt2', 'GPT2LMHeadModel', _GPT2, 'left'),
    Case('gpt2 bare', 'gpt2', 'GPT2Model', _GPT2 | dict(n_inner=None, activation_function='relu')),
    Case('bloom', 'bloom', 'BloomForCausalLM', dict(vocab_size=V, hidden_size=24, n_layer=3, n_head=6), 'left'),
    Case('gpt_neox', 'gpt_neox', 'GPTNeoXForCausalLM', _NEOX | dict(rope_parameters=dict(
        rope_type='default', rope_theta=500.0, partial_rotary_factor=0.5)), 'left'),
    Case('gpt_neox one after the other', 'gpt_neox', 'GPTNeoXForCausalLM', _NEOX | dict(
        use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True)),
    Case('t5', 't5', 'T5ForConditionalGeneration', _T5),
    Case('t5 v1.1', 't5', 'T5ForConditionalGeneration', _T5 | dict(
        feed_forward_proj='gated-gelu', tie_word_embeddings=False)),
    Case('deepseek_v2', 'deepseek_v2', 'DeepseekV2ForCausalLM', _DEEPSEEK | dict(
        n_routed_experts=6, n_group=3, topk_group=2, topk_method='group_limited_greedy', routed_scaling_factor=3.0)),
    Case('deepseek_v2 lite, yarn', 'deepseek_v2', 'DeepseekV2ForCausalLM', _DEEPSEEK | dict(
        q_lora_rank=None, n_routed_experts=5, attention_bias=True, rope_parameters=_ROPE | dict(
            rope_type='yarn', original_max_position_embeddings=7, mscale=0.7, mscale_all_dim=0.7)), 'left'),
    Case('deepseek_v3', 'deepseek_v3', 'DeepseekV3ForCausalLM', _DEEPSEEK | dict(
        n_routed_experts=8, n_group=4, topk_group=2, num_nextn_predict_layers=0, attention_bias=True), 'left'),
    Case('deepseek_v3 bare, yarn', 'deepseek_v3', 'DeepseekV3Model', _DEEPSEEK | dict(
        n_routed_experts=6, n_group=1, topk_group=1, num_nextn_predict_layers=0, norm_topk_prob=False,
        rope_interleave=False, rope_parameters=_ROPE | dict(
            rope_type='yarn', original_max_position_embeddings=7, mscale=0.7, mscale_all_dim=1.0))),
    Case('vit', 'vit', 'ViTForImageClassification', _VIT),
    Case('vit pooled, wide', 'vit', 'ViTModel', _VIT | dict(image_size=[8, 12], patch_size=[2, 4], qkv_bias=False)),
    Case('bart', 'bart', 'BartForConditionalGeneration', _BART),
    Case('bart bare', 'bart', 'BartModel', _BART | dict(scale_embedding=True)),
    Case('mbart', 'mbart', 'MBartForConditionalGeneration', _BART | dict(scale_embedding=True)),
    Case('pegasus', 'pegasus', 'PegasusForConditionalGeneration', _BART | dict(activation_function='relu')),
    Case('marian', 'marian', 'MarianMTModel', _BART | dict(scale_embedding=True, activation_function='swish')),
    Case('marian two embeddings', 'marian', 'MarianMTModel', _BART | dict(share_encoder_decoder_embeddings=False)),
    Case('bert', 'bert', 'BertForMaskedLM', _BERT),
    Case('bert bare', 'bert', 'BertModel', _BERT),
    Case('bert classifier', 'bert', 'BertForSequenceClassification', _BERT),
    Case('roberta', 'roberta', 'RobertaForMaskedLM', _BERT | dict(pad_token_id=1)),
    Case('roberta classifier', 'roberta', 'RobertaForSequenceClassification', _BERT | dict(pad_token_id=1)),
    Case('modernbert', 'modernbert', 'ModernBertForMaskedLM', _MODERN),
    Case('modernbert classifier', 'modernbert', 'ModernBertForSequenceClassification', _MODERN | dict(
        norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True, classifier_pooling='mean')),
)  # fmt: skip


_LEARNED_BUFFERS = ('final_logits_bias', 'e_score_correction_bias')


def make_theirs(case: Case, folder: Path):
    """Makes the torch model with every number random, and writes it to the folder."""
    import torch
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, case.architecture)
    config = cls.config_class(**case.fields)
    model = cls(config).eval()
    model.set_attn_implementation('eager')
    if case.name == 't5 v1.1':
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    learned = {name: value for name, value in model.named_parameters() if value.requires_grad}
    learned |= {name: value for name, value in model.named_buffers() if name.endswith(_LEARNED_BUFFERS)}
    with torch.no_grad():
        for name, value in learned.items():
            around = 1.0 if value.ndim == 1 and 'bias' not in name and case.family != 'gemma2' else 0.0
            spread = 0.2 if value.ndim == 1 else 1.2 * value.shape[-1] ** -0.5
            value.copy_(around + spread * torch.randn_like(value))
    model.save_pretrained(folder)
    return model


def batch(case: Case) -> dict[str, np.ndarray]:
    """Returns the inputs of our model: two rows, the second shorter."""
    rng = np.random.default_rng(0)
    if case.family == 'vit':
        height, width = np.broadcast_to(case.fields['image_size'], 2)
        return dict(images=rng.normal(size=(2, height, width, case.fields['num_channels'])).astype(np.float32))
    tokens, mask = rng.integers(3, V, (2, T)), np.ones((2, T), int)
    if case.padding != 'none':
        mask[1, slice(-3, None) if case.padding == 'right' else slice(3)] = 0
    tokens = np.where(mask, tokens, case.fields.get('pad_token_id', 0)).astype(np.int32)
    if case.family in ('t5', 'bart', 'mbart', 'pegasus', 'marian'):
        return dict(source_tokens=tokens[:, :S], source_mask=mask[:, -S:], target_tokens=tokens, target_mask=mask)
    types = dict(token_types=rng.integers(0, 3, (2, T)).astype(np.int32)) if case.family in ('bert', 'roberta') else {}
    return dict(tokens=tokens, mask=mask) | types


_NAMES = {'source_tokens': 'input_ids', 'source_mask': 'attention_mask', 'target_tokens': 'decoder_input_ids',
          'target_mask': 'decoder_attention_mask', 'tokens': 'input_ids', 'mask': 'attention_mask',
          'token_types': 'token_type_ids'}  # fmt: skip
_FIELDS = {'decoder_hidden_states': 'hiddens', 'hidden_states': 'hiddens', 'encoder_hidden_states': 'encoder_hiddens',
           'decoder_attentions': 'attentions', 'attentions': 'attentions', 'encoder_attentions': 'encoder_attentions',
           'cross_attentions': 'cross_attentions', 'pooler_output': 'pooled'}  # fmt: skip


def run_theirs(case: Case, model, inputs: dict[str, np.ndarray], labels: np.ndarray | None):
    """Returns (outputs under our names, gradients by their names, loss)."""
    import torch

    if case.family == 'vit':
        arguments = {'pixel_values': torch.tensor(np.moveaxis(inputs['images'], 3, 1).copy())}
    else:
        arguments = {_NAMES[name]: torch.tensor(value, dtype=torch.long) for name, value in inputs.items()}
    if case.padding == 'left' and case.family != 'bloom':
        arguments['position_ids'] = (arguments['attention_mask'].cumsum(1) - 1).clamp(min=0)
    if 'input_ids' in arguments and 'decoder_input_ids' not in arguments:
        arguments['use_cache'] = False
    if case.family in ('bert', 'roberta', 'modernbert'):
        arguments.pop('use_cache')
    model.zero_grad()
    out = model(**arguments, output_hidden_states=True, output_attentions=True)
    outputs = {ours: getattr(out, theirs) for theirs, ours in _FIELDS.items() if getattr(out, theirs, None) is not None}
    if case.family == 'vit':
        # Transformers gives the last one before the final norm.
        norm = model.vit.layernorm if hasattr(model, 'vit') else model.layernorm
        outputs['hiddens'] = (*outputs['hiddens'][:-1], norm(outputs['hiddens'][-1]))
    outputs['hidden'] = outputs['hiddens'][-1]
    if labels is None:
        return jax.tree.map(lambda x: x.detach().numpy(), outputs), {}, None
    outputs['logits'] = out.logits
    weights = torch.tensor(_weights(inputs, out.logits.ndim), dtype=torch.float32).reshape(-1)
    flat = out.logits.reshape(-1, out.logits.shape[-1])
    loss = torch.nn.functional.cross_entropy(flat, torch.tensor(labels.reshape(-1), dtype=torch.long), reduction='none')
    loss = (loss * weights).sum() / weights.sum()
    loss.backward()
    gradients = {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
    return jax.tree.map(lambda x: x.detach().numpy(), outputs), _as_in_files(case, gradients), loss.item()


def _as_in_files(case: Case, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns tensors under the names of files, which hold one matrix per expert where the model has them in one."""
    named = {}
    mixtral = case.family == 'mixtral'
    for name, value in tensors.items():
        if mixtral:
            name = name.replace('.mlp.', '.block_sparse_moe.')
        for fused, parts in _FUSED.items():
            if name.endswith('.experts.' + fused):
                for e, matrix in enumerate(value):
                    for part, piece in zip(parts[mixtral], np.split(matrix, len(parts[mixtral])), strict=True):
                        named[name.replace(fused, f'{e}.{part}.weight')] = piece
                break
        else:
            named[name] = value
    return named


# Of each fused tensor, the names of its parts, and those in Mixtral's files.
_FUSED = {'gate_up_proj': (('gate_proj', 'up_proj'), ('w1', 'w3')), 'down_proj': (('down_proj',), ('w2',))}


def _mask(inputs, length: int) -> np.ndarray:
    if 'images' in inputs:
        return np.ones((len(inputs['images']), length), int)
    return inputs['target_mask'] if 'target_mask' in inputs else inputs['mask']


def _weights(inputs, ndim: int) -> np.ndarray:
    mask = _mask(inputs, 1)
    return mask if ndim == 3 else np.ones(len(mask), int)


def run_ours(model, params, inputs: dict[str, np.ndarray], labels: np.ndarray | None):
    """Returns (outputs, gradients in the canonical tree, loss), from one compiled program."""

    def loss_of(params):
        out = model.apply({'params': params}, **inputs, return_hiddens=True, return_attentions=True)
        if labels is None:
            return 0.0, out
        weights = jnp.asarray(_weights(inputs, out.logits.ndim))
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(out.logits), labels[..., None], axis=-1)[..., 0]
        return -(log_probs * weights).sum() / weights.sum(), out

    run = jax.jit(jax.value_and_grad(loss_of, has_aux=True), compiler_options=_COMPILE_FAST)
    (loss, out), gradients = run(params)
    return out, flatten(unroll_params(gradients, model.config)), float(loss)


@dataclasses.dataclass
class Difference:
    """How far two programs are apart, each as a fraction of what is allowed.

    Attributes:
      logits: largest difference over real tokens / max(1, largest |logit|).
      hidden: the same of all hidden states and pooled vectors; attention: of all attention weights.
      loss, gradient: relative difference of the loss, and the largest of the norms of all gradients.
      first: the first hidden state or attention, in order of computation, past the bar; '' if none.
    """

    logits: float = 0.0
    hidden: float = 0.0
    attention: float = 0.0
    loss: float = 0.0
    gradient: float = 0.0
    first: str = ''


BAR, RELATIVE_BAR = 2e-5, 1e-4


def compare(case: Case, theirs: dict, ours, inputs: dict[str, np.ndarray]) -> Difference:
    """Returns the largest differences over real tokens, and the first array past the bar in order of computation."""
    found = Difference()
    own = _mask(inputs, theirs['hidden'].shape[1])
    for stack in ('encoder_', ''):
        mask = inputs['source_mask'] if stack and 'source_mask' in inputs else own
        for layer in range(len(theirs.get(stack + 'hiddens', ()))):
            for name in ('cross_attentions', 'attentions', 'hiddens'):
                arrays = theirs.get(name if name.startswith('cross') and not stack else stack + name, ())
                index = layer if name == 'hiddens' else layer - 1
                if not 0 <= index < len(arrays) or (name.startswith('cross') and stack):
                    continue
                field = name if name.startswith('cross') else stack + name
                value, their_value = np.asarray(getattr(ours, field)[index]), arrays[index]
                if value.ndim == 4:
                    value, their_value = np.moveaxis(value, 1, 2), np.moveaxis(their_value, 1, 2)
                error = _error(value[mask == 1], their_value[mask == 1])
                kind = 'hidden' if name == 'hiddens' else 'attention'
                setattr(found, kind, max(getattr(found, kind), error))
                if error > BAR and not found.first:
                    found.first = f'{field}[{index}]' + (f' (after layer {index - 1})' if name == 'hiddens' else '')
    if 'pooled' in theirs:
        found.hidden = max(found.hidden, _error(np.asarray(ours.pooled), theirs['pooled']))
    if 'logits' in theirs:
        logits, their_logits = np.asarray(ours.logits), theirs['logits']
        real = own == 1 if logits.ndim == 3 else slice(None)
        found.logits = _error(logits[real], their_logits[real])
    return found


def _error(ours: np.ndarray, theirs: np.ndarray) -> float:
    if ours.shape != theirs.shape:
        return float('inf')
    return float(np.max(np.abs(ours - theirs)) / max(1.0, np.max(np.abs(theirs))))


def gradient_difference(case: Case, model, theirs: dict[str, np.ndarray], ours: dict[str, Any]) -> float:
    """Returns the largest relative difference of a gradient's norm, each found through the weight table."""
    family = FAMILIES[case.family]
    plan = make_plan(family, model.config)
    names = {part.name for part in plan}
    theirs = {full_name(family, names, name): value for name, value in theirs.items()}
    largest = max(float(np.linalg.norm(np.asarray(g).ravel())) for g in ours.values())
    worst = 0.0
    for part in plan:
        if part.name not in theirs:
            continue
        for path, value in zip(part.ours, part.rearrange.read(theirs[part.name], part.shapes), strict=True):
            own = np.asarray(ours[path]) if part.expert is None else np.asarray(ours[path])[part.expert]
            norms = [float(np.linalg.norm(np.asarray(g).ravel())) for g in (own, value)]
            # Gradients which are zero but for rounding, such as those of key biases, are held against the largest.
            worst = max(worst, abs(norms[0] - norms[1]) / max(norms[1], 1e-3 * largest))
    return worst


@functools.cache
def measure(name: str, folder: Path):
    """Runs a case both ways from one folder; returns (difference, their model, our model, our parameters, inputs)."""
    case = next(case for case in CASES if case.name == name)
    theirs = make_theirs(case, folder)
    model, params = load_pretrained(folder)
    inputs = batch(case)
    labels = None
    if model.config.head != 'none':
        shape = (2, T) if model.config.head == 'lm' else (2,)
        labels = np.random.default_rng(1).integers(0, model.config.num_classes or V, shape)
    their_out, their_gradients, their_loss = run_theirs(case, theirs, inputs, labels)
    our_out, our_gradients, our_loss = run_ours(model, params, inputs, labels)
    difference = compare(case, their_out, our_out, inputs)
    if labels is not None:
        difference.loss = abs(our_loss - their_loss) / abs(their_loss)
        difference.gradient = gradient_difference(case, model, their_gradients, our_gradients)
    return difference, theirs, model, params, inputs


def round_trip(case: Case, theirs, model, params, inputs, folder: Path) -> float:
    """Exports, has transformers load it strictly, and returns how far its outputs are from before (AutoModel's too).

    Raises:
      AssertionError: where transformers misses a tensor, finds one too many, or where we read back other bits.
    """
    import transformers

    save_pretrained(folder, model, params)
    again, info = type(theirs).from_pretrained(folder, attn_implementation='eager', output_loading_info=True)
    assert not info['missing_keys'] and not info['unexpected_keys'] and not info['mismatched_keys'], info
    bare = transformers.AutoModel.from_pretrained(folder, attn_implementation='eager')
    before, after, automatic = (run_theirs(case, m.eval(), inputs, None)[0] for m in (theirs, again, bare))
    back, params_back = load_pretrained(folder)
    assert back.config.replace(decode=None) == model.config.replace(decode=None)
    for path, value in flatten(params).items():
        np.testing.assert_array_equal(flatten(params_back)[path], value, err_msg=path)
    return max(_error(after['hidden'], before['hidden']), _error(automatic['hidden'], before['hidden']))
