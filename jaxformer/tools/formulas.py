"""The formula of each sublayer as text, from the settings of a model, in the symbols of
`jaxformer.tools.shapes`."""

from jaxformer.config.model import ModelConfig

ACTIVATION_TEXTS = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
    "glu": "sigmoid",
    "relu2": "relu²",
}
NORM_TEXTS = {
    "rms": "y = x / √(mean(x²) + ε) · g",
    "rms1p": "y = x / √(mean(x²) + ε) · (1 + g)",
    "layer": "y = (x - mean(x)) / √(var(x) + ε) · g",
    "none": "y = x",
}
POSITION_TEXTS = {"learned": "P[position]", "sinusoidal": "sinusoids(position)"}
RESIDUAL_TEXTS = {  # of a block, by the placement of its norms
    "pre": "x ← x + {}(norm(x))",
    "post": "x ← norm(x + {}(x))",
    "sandwich": "x ← x + norm({}(norm(x)))",
    "output": "x ← x + norm({}(x))",
}


def formula_of(config: ModelConfig, name: str) -> tuple[str, ...]:
    """The lines of the formula of a sublayer named as in the rows of `jaxformer shapes`
    ("decoder.0.attention"); none for a name that has none.

    Rows of x are tokens: x W is the product of the rows with a matrix, and + b a bias. The last
    line of a sublayer of a block is how its output is added to the residual stream.
    """
    what = name.rpartition(".")[2]
    if what == "norm" or what.endswith("_norm"):
        return _norm_lines(config)
    lines = {
        "embed": _embed_lines,
        "attention": _attention_lines,
        "cross": _cross_lines,
        "ffn": _ffn_lines,
        "head": _head_lines,
    }.get(what)
    if lines is None:
        return ()
    added = RESIDUAL_TEXTS[config.norm_placement].format(what)
    if config.residual == "parallel":
        added += ", with the same x for all sublayers of a block"
    return (*lines(config), *([added] if what in ("attention", "cross", "ffn") else []))


def _bias(config: ModelConfig, where: str, name: str = "b") -> str:
    return f" + {name}" if where in config.biased else ""


def _norm_lines(config: ModelConfig) -> tuple[str, ...]:
    text = NORM_TEXTS.get(config.norm, f"y = {config.norm}(x)")
    return (text + (_bias(config, "norm") if config.norm == "layer" else ""),)


def _embed_lines(config: ModelConfig) -> tuple[str, ...]:
    text = "E[token]" + (" · √D" if config.embedding_scale == "sqrt" else "")
    if config.positions in POSITION_TEXTS:
        text += f" + {POSITION_TEXTS[config.positions]}"
    text += " + U[token type]" if config.token_types else ""
    return (f"x = norm({text})" if config.embedding_norm else f"x = {text}",)


def _projections(config: ModelConfig, seen: str, rotated: bool) -> str:
    """Queries, keys and values, of which keys and values read `seen`."""
    queries, keys, values = (
        f"{rows} W_{name}{_bias(config, 'qkv', f'b_{name}')}"
        for rows, name in (("x", "Q"), (seen, "K"), (seen, "V"))
    )
    if config.query_key_norm != "none":
        queries, keys = f"norm({queries})", f"norm({keys})"
    if rotated and config.positions == "rope":
        queries, keys = f"RoPE({queries})", f"RoPE({keys})"
    return f"Q = {queries},  K = {keys},  V = {values}"


def _weights(config: ModelConfig, biased: bool) -> tuple[str, ...]:
    """The scores, the weights, and the output of attention."""
    scale = f"· {config.attention_scale:g}" if config.attention_scale else "/ √H"
    scores = f"Q Kᵀ {scale}"
    if config.attention_soft_cap:
        cap = f"{config.attention_soft_cap:g}"
        scores = f"{cap} tanh(({scores}) / {cap})"
    scores += {"alibi": " - slope · distance", "t5": " + bias[distance]"}.get(
        config.positions if biased else "", ""
    )
    sinks = ", with a learned logit beside the keys" if config.attention_sinks else ""
    out = f"attention = A V W_O{_bias(config, 'out', 'b_O')}"
    return f"A = softmax({scores} + mask){sinks}", out


def _attention_lines(config: ModelConfig) -> tuple[str, ...]:
    return _projections(config, "x", rotated=True), *_weights(config, biased=True)


def _cross_lines(config: ModelConfig) -> tuple[str, ...]:
    weights, out = _weights(config, biased=False)
    projections = _projections(config, "m", rotated=False)
    return f"{projections},  m = encoder output", weights, out.replace("attention", "cross", 1)


def _ffn_lines(config: ModelConfig) -> tuple[str, ...]:
    name = ACTIVATION_TEXTS.get(config.activation, config.activation)
    up, down = f"x W_up{_bias(config, 'ffn')}", _bias(config, "ffn", "c")
    if config.gated:
        gate = f"x W_gate{_bias(config, 'ffn', 'a')}"
        return (f"ffn = ({name}({gate}) ⊙ ({up})) W_down{down}",)
    return (f"ffn = {name}({up}) W_down{down}",)


def _head_lines(config: ModelConfig) -> tuple[str, ...]:
    if config.output == "none":
        return ("out = x",)
    lines, read = [], "x"
    if config.output == "classes":
        rows = {"first": "x of the first token", "last": "x of the last token"}
        lines.append(f"p = {rows.get(config.pooled, 'mean of x over the tokens')}")
        read = "p"
        if config.pooler or config.next_sentence or config.family == "encoder":
            lines, read = [lines[0], "h = tanh(p W_h + b_h)"], "h"
    if config.output == "masked":
        name = ACTIVATION_TEXTS.get(config.activation, config.activation)
        lines, read = [f"h = norm({name}(x W_h + b_h))"], "h"
    read += " / √D" if config.logit_scale == "rsqrt" else ""
    over_tokens = config.output in ("language", "masked")
    matrix = "Eᵀ" if config.tied_head and over_tokens else "W_headᵀ"
    biased = config.head_bias or config.output != "language"
    logits = f"{read} {matrix}" + (" + b" if biased else "")
    if config.logit_soft_cap:
        cap = f"{config.logit_soft_cap:g}"
        logits = f"{cap} tanh(({logits}) / {cap})"
    return (*lines, f"logits = {logits},  probabilities = softmax(logits)")
