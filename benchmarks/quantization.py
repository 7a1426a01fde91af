"""Quantised models beside the full one: memory, files, quality, speed. Run with nothing else on the machine.

    python -m benchmarks.quantization --workdir=runs/default --sentences=300
    python -m benchmarks.quantization --pretrained=FOLDER_OR_GGUF --text=FILE      (needs the extra `parity`)

Of a run which translates, quality is sacreBLEU of its test split's first sentences, searched as the run searches; of a
decoder, the perplexity of a text in windows of --window tokens. Memory is what the compiled program takes as arguments,
where int4 is half a byte; temporaries are what a greedy search of one row allocates beside them; files are what
`save_quantized` writes. Speed is greedy search of --tokens tokens; the choices take turns, and the median round counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.protocol import machine_line
from transformer_jax.data.sources import iterate, open_split
from transformer_jax.decoding import DecodeConfig, generate, init_cache
from transformer_jax.decoding import score as score_targets
from transformer_jax.decoding.generate import search
from transformer_jax.decoding.inputs import prepare
from transformer_jax.huggingface import load_pretrained
from transformer_jax.models import build, unroll_params
from transformer_jax.quantization import quantize, save_quantized
from transformer_jax.training.restore import load_run
from transformer_jax.training.scores import score
from transformer_jax.training.translate import translate

CHOICES = {
    'full': ('none', 'none'),
    'int8': ('int8', 'none'),
    'int8_activations': ('int8_activations', 'none'),
    'int4': ('int4', 'none'),
    'int8 cache': ('none', 'int8'),
    'int8, int8 cache': ('int8', 'int8'),
    'int4, int8 cache': ('int4', 'int8'),
}


def main() -> None:
    """Measures every choice and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--workdir', help='a run which translates')
    parser.add_argument('--pretrained', help='or a folder of a decoder of Hugging Face, or a GGUF file')
    parser.add_argument('--choices', nargs='+', choices=CHOICES, default=list(CHOICES))
    parser.add_argument('--group', type=int, default=32, help='numbers which share a scale in int4')
    parser.add_argument('--sentences', type=int, default=300, help='of the test split; 0 leaves BLEU out')
    parser.add_argument('--text', type=Path, help='text whose perplexity is taken')
    parser.add_argument('--window', type=int, default=512, help='tokens of a window of the text')
    parser.add_argument('--windows', type=int, default=16, help='most windows of the text')
    parser.add_argument('--batches', type=int, nargs='+', default=[1, 16], help='rows of the timed search')
    parser.add_argument('--length', type=int, default=32, help='tokens of the timed sources or prompts')
    parser.add_argument('--tokens', type=int, default=64, help='new tokens of the timed search')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--output', type=Path, help='also write everything here, as JSON')
    arguments = parser.parse_args()
    if (arguments.workdir is None) == (arguments.pretrained is None):
        parser.error('give a run by --workdir, or a checkpoint by --pretrained')
    if arguments.workdir:
        model, params, quality = _run(arguments)
    else:
        model, params, quality = _pretrained(arguments)
    config = model.config.replace(layer_stack='unrolled')
    model, params = build(config), jax.tree.map(np.asarray, unroll_params(params, model.config))
    found = {}
    for name in arguments.choices:
        print(f'{name} ...', file=sys.stderr)
        weights, cache = CHOICES[name]
        own, quantized = quantize(model, params, weights, cache=cache, group=arguments.group)
        quantized = jax.device_put(quantized)
        found[name] = (
            {'model': own, 'params': quantized} | _sizes(own, quantized, arguments.length) | quality(own, quantized)
        )
    for batch in arguments.batches if arguments.rounds else ():
        for name, seconds in _speeds(found, batch, arguments).items():
            found[name][f'tokens/s, batch {batch}'] = batch * arguments.tokens / statistics.median(seconds)
    rows = {
        name: {key: value for key, value in facts.items() if key not in ('model', 'params')}
        for name, facts in found.items()
    }
    print(machine_line())
    print(table(rows))
    if arguments.output:
        arguments.output.write_text(json.dumps({'machine': machine_line(), 'rows': rows}, indent=1) + '\n')


def table(rows: dict[str, dict[str, float]]) -> str:
    """Returns a Markdown table; sizes and speeds also as factors of the first row."""
    first = next(iter(rows.values()))
    lines = [['', *first], ['---'] * (1 + len(first))]
    for name, facts in rows.items():
        cells = []
        for key, value in facts.items():
            if 'MB' in key:
                cells.append(f'{value:.2f} ({first[key] / value:.2f}x)')
            elif 'tokens/s' in key:
                cells.append(f'{value:.0f} ({value / first[key]:.2f}x)')
            else:
                cells.append(f'{value:.2f}')
        lines.append([name, *cells])
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


Quality = Callable[[Any, Any], dict[str, float]]


def _run(arguments: argparse.Namespace) -> tuple[Any, Any, Quality]:
    run = load_run(arguments.workdir)
    pairs = list(iterate(open_split(run.experiment.data, 'test')))[: arguments.sentences]

    def bleu(model, params):
        if not pairs:
            return {}
        answers = translate(
            model, params, run.tokenizer, [pair['source'] for pair in pairs], run.decode,
            longest=run.experiment.data.source_length, rows=64,
        )  # fmt: skip
        scores = score([best[0].text for best in answers], [pair['target'] for pair in pairs])
        return {f'BLEU, {len(pairs)} sentences': scores.bleu}

    return run.model, run.params, bleu


def _pretrained(arguments: argparse.Namespace) -> tuple[Any, Any, Quality]:
    path, names = Path(arguments.pretrained), {}
    if path.suffix == '.gguf':
        from transformer_jax.huggingface.gguf import load_gguf

        model, params = load_gguf(path)
        path, names = path.parent, {'gguf_file': path.name}
    else:
        model, params = load_pretrained(path)
    if arguments.text is None:
        return model, params, lambda model, params: {}
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(path, **names)(arguments.text.read_text())['input_ids']
    count = min(len(ids) // arguments.window, arguments.windows)
    windows = np.array(ids[: count * arguments.window]).reshape(count, arguments.window)

    def perplexity(model, params):
        values = np.concatenate([score_targets(model, params, row[None, :1], row[None, 1:])[0] for row in windows])
        return {f'perplexity, {values.size} tokens': float(np.exp(-values.mean()))}

    return model, params, perplexity


def _sizes(model: Any, params: Any, length: int) -> dict[str, float]:
    """Megabytes (10^6 bytes) of compiled arguments, files, a search's temporaries, and a cache."""
    tokens = np.zeros((1, 1), np.int32)
    inputs = {'tokens': tokens}
    if model.config.kind == 'encoder_decoder':
        inputs = {'source_tokens': tokens, 'target_tokens': tokens}
    source = np.zeros((1, length), np.int32) if model.config.kind == 'encoder_decoder' else None
    compiled = jax.jit(lambda params: model.apply({'params': params}, **inputs).logits).lower(params).compile()
    cache = jax.eval_shape(lambda: init_cache(model, 1, 1000, source).mixers)
    with tempfile.TemporaryDirectory() as folder:
        save_quantized(folder, model, params)
        files = sum(path.stat().st_size for path in Path(folder).iterdir())
    prompt = np.full((1, length), 4)
    given, static, capacity = prepare(model.config, prompt, None, DecodeConfig(max_new_tokens=length), 0)
    whole = search.lower(params, given, model=model, config=static, capacity=capacity).compile()
    return {
        'arguments, MB': compiled.memory_analysis().argument_size_in_bytes / 1e6,
        'files, MB': files / 1e6,
        'temporaries of a search, MB': whole.memory_analysis().temp_size_in_bytes / 1e6,
        'cache of 1000 tokens, MB': sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)) / 1e6,
    }


def _speeds(found: dict[str, Any], batch: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    search = DecodeConfig(max_new_tokens=arguments.tokens, eos_ids=())
    vocabulary = next(iter(found.values()))['model'].config.vocab_size
    tokens = np.random.default_rng(0).integers(4, vocabulary, (batch, arguments.length))
    seconds = {name: [] for name in found}
    for number in range(arguments.rounds + 1):
        for name, facts in found.items():
            start = time.perf_counter()
            generate(facts['model'], facts['params'], tokens, config=search)
            if number:  # the first time compiles
                seconds[name].append(time.perf_counter() - start)
    return seconds


if __name__ == '__main__':
    main()
