"""The Transformer in numpy float64, one sentence at a time, written from the papers and not from the library.

Nothing here is batched, padded, cached or fused: heads and placements are spelt out one by one, and parameters are read
by name from the unrolled tree. A config serves only as a list of choices.
"""

import math
from fractions import Fraction

import numpy as np

F64 = np.float64


# Attention.


def softmax(scores, visible):
    """Softmax over the visible entries of each row; a row which sees nothing is all zeros."""
    out = np.zeros(scores.shape, F64)
    for row in np.ndindex(scores.shape[:-1]):
        seen = np.flatnonzero(visible[row])
        if len(seen):
            e = np.exp(scores[row][seen] - scores[row][seen].max())
            out[row][seen] = e / e.sum()
    return out


def attend(query_TNH, key_SKH, value_SKV, visible_TS, scale, bias_NTS=None, softcap=None):
    """Vaswani et al. 2017, equation 1, head by head; consecutive query heads share a key head. Gives (TNV, NTS)."""
    N, K = query_TNH.shape[1], key_SKH.shape[1]
    heads, all_weights = [], []
    for n in range(N):
        k = n * K // N
        scores = np.asarray(query_TNH[:, n], F64) @ np.asarray(key_SKH[:, k], F64).T * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if bias_NTS is not None:
            scores = scores + bias_NTS[n]
        weights = softmax(scores, visible_TS)
        heads.append(weights @ np.asarray(value_SKV[:, k], F64))
        all_weights.append(weights)
    return np.stack(heads, 1), np.stack(all_weights)


def triangle(T, S=None, window=None, prefix=0):
    """Which key a causal query sees, written as a double loop; the last query stands at the last key."""
    S = T if S is None else S
    seen = np.zeros((T, S), bool)
    for i in range(T):
        own = i + S - T
        for j in range(S):
            seen[i, j] = (j <= own or j < prefix) and (window is None or abs(own - j) < window)
    return seen


# Positions.


def sinusoid(positions, D, layout='interleaved'):
    """Vaswani et al. 2017, section 3.5; 'halves' has the sines first."""
    out = np.zeros((len(positions), D))
    for row, p in enumerate(positions):
        for i in range(D // 2):
            angle = p / 10000 ** (2 * i / D)
            at_sine, at_cosine = (2 * i, 2 * i + 1) if layout == 'interleaved' else (i, D // 2 + i)
            out[row, at_sine], out[row, at_cosine] = math.sin(angle), math.cos(angle)
    return out


def rope_frequencies(width, theta=10000.0):
    return np.array([theta ** (-2 * i / width) for i in range(width // 2)])


def rope(x_TNH, positions, frequencies, layout):
    """Su et al. 2021, equation 12: each pair of features is a complex number, turned by position x frequency."""
    pairs = len(frequencies)
    out = np.array(x_TNH, F64)
    for i, f in enumerate(frequencies):
        a, b = (i, i + pairs) if layout == 'half' else (2 * i, 2 * i + 1)
        turned = (out[..., a] + 1j * out[..., b]) * np.exp(1j * np.asarray(positions, F64) * f)[:, None]
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


def yarn_frequencies(width, theta, factor, trained, fast=32.0, slow=1.0):
    """Peng et al. 2023, section 3.2, with the released code's ramp over whole pair indices."""

    def pair_which_turns(turns):
        # Solve trained * theta^(-2 i / width) = 2 pi turns for i.
        return width / 2 * math.log(trained / (2 * math.pi * turns), theta)

    first, last = math.floor(pair_which_turns(fast)), math.ceil(pair_which_turns(slow))
    first, last = max(first, 0), min(last, width - 1)
    out = []
    for i, f in enumerate(rope_frequencies(width, theta)):
        slowed = min(max((i - first) / max(last - first, 1e-3), 0), 1)
        out.append((1 - slowed) * f + slowed * f / factor)
    return np.array(out)


def llama3_frequencies(width, theta, factor, trained, low, high):
    """Grattafiori et al. 2024, by wavelengths as in the released code."""
    out = []
    for f in rope_frequencies(width, theta):
        wavelength = 2 * math.pi / f
        if wavelength < trained / high:
            out.append(f)
        elif wavelength > trained / low:
            out.append(f / factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            out.append((1 - smooth) * f / factor + smooth * f)
    return np.array(out)


def alibi_slopes(N):
    """Press et al. 2022, section 3, and the authors' recursion for head counts which are no power of two."""
    if N & (N - 1) == 0:
        start = 2.0 ** (-8 / N)
        return [start ** (n + 1) for n in range(N)]
    below = 1 << (N.bit_length() - 1)
    return alibi_slopes(below) + alibi_slopes(2 * below)[0::2][: N - below]


def t5_bucket(distance, bidirectional, buckets=32, max_distance=128):
    """Raffel et al. 2020, section 2.1, in exact arithmetic; distance is key minus query position."""
    if bidirectional:
        buckets //= 2
        side, n = (buckets if distance > 0 else 0), abs(distance)
    else:
        side, n = 0, max(-distance, 0)
    exact = buckets // 2
    if n < exact:
        return side + n
    far = buckets - exact
    # floor(log(n / exact) / log(max / exact) * far): the largest k with (n / exact)^far >= (max / exact)^k.
    k = 0
    while k < far - 1 and Fraction(n, exact) ** far >= Fraction(max_distance, exact) ** (k + 1):
        k += 1
    return side + exact + k


# Layers.


def normalise(x, p, kind, epsilon):
    x = np.asarray(x, F64)
    if kind == 'layer':
        centred = x - x.mean(-1, keepdims=True)
        y = centred / np.sqrt(centred.var(-1, keepdims=True) + epsilon) * p['scale']
        return y + p['bias'] if 'bias' in p else y
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
    return y * (1 + np.asarray(p['scale'], F64) if kind == 'rms_plus_one' else p['scale'])


def affine(x, p, inputs=1):
    y = np.tensordot(x, np.asarray(p['kernel'], F64), inputs)
    return y + p['bias'] if 'bias' in p else y


def _normal_cdf(x):
    return 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


ACTIVATION = {
    'relu': lambda x: np.maximum(x, 0),
    'gelu': lambda x: x * _normal_cdf(x),
    'gelu_tanh': lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    'silu': lambda x: x / (1 + np.exp(-x)),
}


def feed_forward(x, p, kind):
    if kind.startswith('gated_'):
        return affine(ACTIVATION[kind[len('gated_') :]](affine(x, p['gate'])) * affine(x, p['up']), p['down'])
    return affine(ACTIVATION[kind](affine(x, p['up'])), p['down'])


def multi_head(x_TD, context_SD, p, config, visible_TS, bias_NTS=None, local=False, cross=False):
    """Vaswani et al. 2017, section 3.2.2. Gives (y TD, weights NTS)."""
    query, key, value = affine(x_TD, p['query']), affine(context_SD, p['key']), affine(context_SD, p['value'])

    def qk_norm(z, name):
        if config.qk_norm == 'none':
            return z
        flat = z if config.qk_norm == 'head' else z.reshape(len(z), -1)
        return normalise(flat, p[name], config.norm, config.norm_epsilon).reshape(z.shape)

    query, key = qk_norm(query, 'query_norm'), qk_norm(key, 'key_norm')
    d_k = query.shape[-1]
    if config.position == 'rope' and not cross:
        theta = config.rope_local_theta if local and config.rope_local_theta else config.rope_theta
        turn = rope_frequencies(int(d_k * config.rope_fraction), theta)
        query = rope(query, range(len(query)), turn, config.rope_layout)
        key = rope(key, range(len(key)), turn, config.rope_layout)
    scale = 1 / math.sqrt(d_k) if config.attention_scale is None else config.attention_scale
    heads, weights = attend(query, key, value, visible_TS, scale, bias_NTS, config.attention_softcap)
    return affine(heads, p['out'], 2), weights


def deepnorm_alpha(config, stack):
    """Wang et al. 2022, figure 2."""
    N, M = config.num_layers, config.num_decoder_layers or config.num_layers
    if config.kind != 'encoder_decoder':
        return (2 * N) ** (1 / 4)
    return 0.81 * (N**4 * M) ** (1 / 16) if stack == 'encoder' else (3 * M) ** (1 / 4)


def deepnorm_beta(config, stack):
    """Wang et al. 2022, figure 2."""
    N, M = config.num_layers, config.num_decoder_layers or config.num_layers
    if config.kind != 'encoder_decoder':
        return (8 * N) ** (-1 / 4)
    return 0.87 * (N**4 * M) ** (-1 / 16) if stack == 'encoder' else (12 * M) ** (-1 / 4)


def sublayer(x, f, p, config, stack):
    """A residual connection around f, each placement as its own paper writes it."""

    def norm(name, z):
        return normalise(z, p[name], config.norm, config.norm_epsilon)

    match config.norm_position:
        case 'post':
            return norm('out_norm', x + f(x))
        case 'pre':
            return x + f(norm('in_norm', x))
        case 'sandwich':
            return x + norm('branch_norm', f(norm('in_norm', x)))
        case 'res_post':
            return x + norm('branch_norm', f(x))
        case 'deepnorm':
            return norm('out_norm', deepnorm_alpha(config, stack) * x + f(x))


def stack_of_layers(x, params, config, stack, visible, context=None):
    """Gives (hidden after the final norm, all hiddens before it, attention weights, cross-attention weights)."""
    T = len(x)
    bias = None
    distance = np.arange(T)[None] - np.arange(T)[:, None]
    if config.position == 'alibi':
        bias = -np.abs(distance)[None] * np.array(alibi_slopes(config.num_heads))[:, None, None]
    if config.position == 'relative':
        table = np.asarray(params['relative_bias'], F64)
        sizes = stack == 'encoder', config.relative_buckets, config.relative_max_distance
        bias = np.array([[table[t5_bucket(int(d), *sizes)] for d in row] for row in distance]).transpose(2, 0, 1)
    depth = config.num_decoder_layers if stack == 'decoder' and config.num_decoder_layers else config.num_layers
    hiddens, attentions, crosses = [x], [], []
    for i in range(depth):
        p = params[f'layers_{i}']
        local = config.layer_pattern[i % len(config.layer_pattern)] == 'local'
        near = visible & (np.abs(distance) < config.window) if local else visible

        def itself(z, p=p, near=near, local=local):
            y, weights = multi_head(z, z, p['attention'], config, near, bias, local)
            attentions.append(weights)
            return y

        def other(z, p=p):
            everything = np.ones((len(z), len(context)), bool)
            y, weights = multi_head(z, context, p['cross_attention'], config, everything, cross=True)
            crosses.append(weights)
            return y

        def inner(z, p=p):
            return feed_forward(z, p['ffn'], config.ffn)

        if config.norm_position.startswith('parallel'):
            one = normalise(x, p['attention_residual']['in_norm'], config.norm, config.norm_epsilon)
            two = one
            if config.norm_position == 'parallel_two_norms':
                two = normalise(x, p['ffn_residual']['in_norm'], config.norm, config.norm_epsilon)
            x = x + itself(one) + inner(two)
        else:
            x = sublayer(x, itself, p['attention_residual'], config, stack)
            if context is not None:
                x = sublayer(x, other, p['cross_attention_residual'], config, stack)
            x = sublayer(x, inner, p['ffn_residual'], config, stack)
        hiddens.append(x)
    if config.final_norm or (config.final_norm is None and config.norm_position not in ('post', 'deepnorm')):
        x = normalise(x, params['final_norm'], config.norm, config.norm_epsilon)
    return x, hiddens, attentions, crosses


def embed(tokens, table, params, config, token_types=None):
    x = np.asarray(table, F64)[tokens]
    if config.embedding_scale == 'sqrt_d_model':
        x = x * math.sqrt(config.d_model)
    places = np.arange(len(tokens)) + config.position_offset
    if config.position in ('sinusoidal', 'sinusoidal_halves'):
        layout = 'halves' if config.position == 'sinusoidal_halves' else 'interleaved'
        x = x + sinusoid(places, config.d_model, layout)
    if config.position == 'learned':
        x = x + np.asarray(params['position']['embedding'], F64)[places]
    if config.token_types:
        types = np.zeros(len(tokens), int) if token_types is None else token_types
        x = x + np.asarray(params['token_type']['embedding'], F64)[types]
    if config.embedding_norm:
        x = normalise(x, params['norm'], config.norm, config.norm_epsilon)
    return x


def vocabulary_scores(hidden, params, config, table):
    hidden = hidden * config.logits_scale
    if config.tie_embeddings in ('output', 'all'):
        y = hidden @ np.asarray(table, F64).T
    else:
        y = affine(hidden, params['head']['output'])
    if config.logits_bias:
        y = y + params['head']['bias']
    return y if config.logits_softcap is None else config.logits_softcap * np.tanh(y / config.logits_softcap)


def encoder_decoder(params, config, source, target):
    """Logits TV of Vaswani et al. 2017, figure 1, and a dict of what lies between."""
    shared = config.tie_embeddings in ('inputs', 'all')
    source_table = params['embedding' if shared else 'source_embedding']['embedding']
    target_table = params['embedding' if shared else 'target_embedding']['embedding']
    x = embed(source, source_table, params.get('encoder_embedder', {}), config)
    memory, encoder_hiddens, encoder_attentions, _ = stack_of_layers(
        x, params['encoder'], config, 'encoder', np.ones((len(source), len(source)), bool)
    )
    y = embed(target, target_table, params.get('decoder_embedder', {}), config)
    hidden, hiddens, attentions, crosses = stack_of_layers(
        y, params['decoder'], config, 'decoder', triangle(len(target)), memory
    )
    between = dict(
        encoder_hidden=memory, encoder_hiddens=encoder_hiddens, encoder_attentions=encoder_attentions,
        hidden=hidden, hiddens=hiddens, attentions=attentions, cross_attentions=crosses,
    )  # fmt: skip
    return vocabulary_scores(hidden, params, config, target_table), between


def language_model(params, config, tokens, token_types=None):
    """Logits TV of one stack: an 'encoder' sees everything, a 'decoder' what came before."""
    table = params['embedding']['embedding']
    x = embed(tokens, table, params.get('embedder', {}), config, token_types)
    T = len(tokens)
    visible = triangle(T) if config.kind == 'decoder' else np.ones((T, T), bool)
    hidden, *_ = stack_of_layers(x, params[config.kind], config, config.kind, visible)
    return vocabulary_scores(hidden, params, config, table)


def count_parameters(V, D, F, N, d_k, d_v, encoder_layers, decoder_layers, learned_positions=0):
    """Parameters of the 2017 model with three-way tying: matrices of attention without biases, FFN with."""
    attention = 2 * D * N * d_k + 2 * D * N * d_v
    inner = D * F + F + F * D + D
    norm = 2 * D
    encoder = encoder_layers * (attention + inner + 2 * norm)
    decoder = decoder_layers * (2 * attention + inner + 3 * norm)
    return V * D + encoder + decoder + 2 * learned_positions * D
