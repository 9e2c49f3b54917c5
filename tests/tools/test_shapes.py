"""`jaxformer shapes`: the rows are what a forward pass computes, and their sums what is counted
elsewhere."""

import functools
import itertools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from families import FAMILIES, LATENT, POSITIONS, SIZES
from products import covering, slow_but

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.config.settings import with_settings
from jaxformer.models.cost import flops_per_token, parameter_count
from jaxformer.tools.inspect import inspect
from jaxformer.tools.model_shapes import ShapeRow, shapes_of

HEADS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-head": {"n_kv_heads": 0},
    "multi-query": {"n_kv_heads": 1},
    "wide values": {
        "attention.value_dim": 6,
        "attention.query_key_norm": "width",
        "attention.sinks": True,
    },
    "latent": LATENT,
}
B, T, S = 3, 11, 22  # S a multiple of T, since FLOPs are counted for a token of the target


def model(family: str, **changes: Any) -> jf.ModelConfig:
    return with_settings(jf.ModelConfig(), SIZES | {"family": family} | changes)


def captured(config: jf.ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of all that `jf.inspect` returns, and of the logits."""
    batch = {"tokens": jax.ShapeDtypeStruct((B, T), jnp.int32)}
    if config.family == "encoder_decoder":
        batch["source"] = jax.ShapeDtypeStruct((B, S), jnp.int32)

    def run(key: jax.Array, batch: dict[str, Any]) -> Any:
        return inspect(jf.init(config, key), config, capture=("*",), **batch)

    found = jax.eval_shape(run, jax.random.key(0), batch)
    values = {name: value.shape for name, value in found.values.items()}
    return values | {"head": found.logits.shape}


def each(rows: list[ShapeRow]) -> dict[str, ShapeRow]:
    """The rows of every layer by name."""
    found = {}
    for row in rows:
        for layer in row.layers or (-1,):
            stack, _, rest = row.name.partition(".")
            inner = f"{stack}.{layer}.{rest.partition('.')[2]}"
            found[inner if row.layers else row.name] = row
    return found


# Latent attention has no keys for disentangled positions.
ROWS = [
    row
    for row in itertools.product(FAMILIES, POSITIONS, HEADS)
    if row[1:] != ("disentangled", "latent")
]


@pytest.mark.parametrize("family, positions, heads", covering(ROWS, 1))
def test_the_rows_are_what_inspect_captures_and_their_sums_what_is_counted(
    family: str, positions: str, heads: str
) -> None:
    config = model(family, positions=positions, **HEADS[heads])
    rows = shapes_of(config, B, T, S)
    found, compared = each(rows), 0
    for name, shape in captured(config).items():
        stack, _, rest = name.partition(".")
        layer, _, what = rest.partition(".")
        # The captures of every mixer have the names of attention's.
        what = what.replace("attention", config.mixer)
        if what.endswith("_weights"):
            scores = found[f"{stack}.{layer}.{what.removesuffix('_weights')}.scores"].makes[0]
            # [B, K, G, T, S] are the heads [B, N, T, S] by groups
            assert (*scores[:1], math.prod(scores[1:-2]), *scores[-2:]) == shape
        elif what.endswith("_out"):
            sublayer = what.removesuffix("_out").replace("mlp", "ffn")
            assert found[f"{stack}.{layer}.{sublayer}"].makes == (shape,)
        elif what == "residual":
            assert found[f"{stack}.{layer}.ffn"].reads == (shape,)
        elif what == "mlp_units":
            assert found[f"{stack}.{layer}.ffn.up"].makes == (shape,)
        else:
            assert found[name].makes == (shape,)
        compared += 1
    assert compared > 3 * config.n_layers
    assert sum(row.times * row.parameters for row in rows) == parameter_count(config)
    forward = sum(row.times * row.flops for row in rows if not row.depth)
    assert 3 * forward == B * T * flops_per_token(config, T, S * (family == "encoder_decoder"))
    assert forward == sum(row.times * row.flops for row in rows if row.depth)


def test_symbols_name_the_axes() -> None:
    rows = each(
        shapes_of(
            model("decoder", **{"attention.value_dim": 6, "attention.kernel": "blocked"}), B, T
        )
    )
    values = rows["decoder.1.attention.values"]
    assert values.reads_symbols == ("[B, K, G, T, T]", "[B, T, K, W]")
    assert values.makes_symbols == ("[B, T, N, W]",)
    assert values.reads == ((B, 2, 2, T, T), (B, T, 2, 6)) and values.makes == ((B, T, 4, 6),)
    rows = each(shapes_of(model("encoder_decoder", n_kv_heads=0, dtype="bfloat16"), B, T, S))
    cross = rows["decoder.0.cross.scores"]
    assert cross.reads_symbols == ("[B, T, N, H]", "[B, S, N, H]")
    assert cross.makes_symbols == ("[B, N, T, S]",)
    narrow = each(shapes_of(model("decoder", **{"embedding.width": 8}), B, T))["embed.projection"]
    assert narrow.reads_symbols == ("[B, T, 8]",) and narrow.makes_symbols == ("[B, T, D]",)


@pytest.mark.parametrize("rows, length", [(1, 1), *slow_but([(1, 5), (5, 1)])])
def test_a_batch_of_one_row_or_token_has_the_same_axes(rows: int, length: int) -> None:
    for family in FAMILIES:
        config = model(family)
        small, large = (shapes_of(config, *sizes) for sizes in ((rows, length), (B, T)))
        for one, other in zip(small, large, strict=True):
            assert one.reads_symbols == other.reads_symbols
            assert one.makes_symbols == other.makes_symbols
            assert [len(shape) for shape in (*one.reads, *one.makes)] == [
                len(shape) for shape in (*other.reads, *other.makes)
            ]
    pooled = model("encoder", **{"head.kind": "classes", "head.n_classes": 3})
    assert each(shapes_of(pooled, rows, length))["head"].makes == ((rows, 1, 3),)


def test_layers_that_differ_are_rows_of_their_own() -> None:
    equal = shapes_of(model("decoder", n_layers=4), B, T)
    assert {row.label for row in equal if not row.depth} >= {"decoder.0-3.ffn", "embed", "head"}
    assert all(row.times in (1, 4) for row in equal)
    one = shapes_of(model("decoder", n_layers=1), B, T)
    assert {row.label for row in one} >= {"decoder.0.ffn"}
    assert len(one) == len(equal)


def test_what_no_sublayer_reads_is_counted_apart() -> None:
    config = model("encoder", positions="t5", **{"head.kind": "masked", "head.next_sentence": True})
    rows = shapes_of(config, B, T)
    assert rows[-1].name == "other" and rows[-1].parameters > 0 and not rows[-1].makes
    assert sum(row.times * row.parameters for row in rows) == parameter_count(config)


# Section 3 of "Attention Is All You Need" (arXiv:1706.03762): N = 6, d_model = 512, d_ff = 2048,
# h = 8, d_k = d_v = 64; every matrix with a bias.
BASE = {
    "encoder.0-5.attention": ("x 6", "[B, S, D] -> [B, S, D]", 4 * (512 * 512 + 512)),
    "decoder.0-5.attention": ("x 6", "[B, T, D] -> [B, T, D]", 4 * (512 * 512 + 512)),
    "decoder.0-5.cross": ("x 6", "[B, S, D] [B, T, D] -> [B, T, D]", 4 * (512 * 512 + 512)),
    "decoder.0-5.ffn": ("x 6", "[B, T, D] -> [B, T, D]", 2 * 512 * 2048 + 2048 + 512),
    "head": ("", "[B, T, D] -> [B, T, V]", 0),  # the embedding, once more
}


def test_the_base_transformer_is_that_of_the_paper(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxformer.cli.shapes.shapes_of", functools.cache(shapes_of))
    command = ["shapes", "configs/transformer_base.py", "--train.batch_size", "2"]
    command += ["--train.microbatches", "1", "--data.sequence_length", "40"]
    assert main([*command, "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    by_name = {row["name"]: row for row in numbers["rows"]}
    for label, (_, _, parameters) in BASE.items():
        assert by_name[label.replace("0-5", "0")]["parameters"] == parameters
    assert by_name["encoder.0.attention.q"]["makes"] == [[2, 40, 8, 64]]
    assert by_name["decoder.0.attention.scores"]["makes_symbols"] == ["[B, N, T, T]"]
    assert by_name["decoder.0.ffn.up"]["makes"] == [[2, 40, 2048]]
    assert by_name["decoder.0.cross"]["layers"] == [*range(6)]

    assert main(command) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: " ".join(line.split()) for line in out.splitlines() if line}
    for label, (times, shapes, _) in BASE.items():
        assert lines[label].startswith(" ".join(f"{label} {times} {shapes}".split()))
    assert "S tokens of a source" in out
    assert out.splitlines()[0].split() == [
        *("sublayer", "layers", "shapes", "in", "numbers", "parameters", "FLOPs")
    ]


def test_what_is_not_known_or_not_shown_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shapes", "configs/quickstart.py", "--model.head.kind", "classes"]) == 0
    assert "classes are assumed" in capsys.readouterr().err
    assert main(["shapes", "configs/quickstart.py", "--tokenizer.kind", "characters"]) == 2
    assert "model.vocab_size=0" in capsys.readouterr().err


def test_the_products_of_experts_are_rows_and_their_sums_what_is_counted() -> None:
    """Layers with and without experts, and a shared expert."""
    sizes = {
        "experts.n": 6,
        "experts.per_token": 2,
        "experts.d_ff": 20,
        "experts.shared_ff": 10,
        "n_layers": 4,
    }
    config = model("decoder", feed_forward="experts", **sizes, **{"experts.pattern": "ed"})
    rows = shapes_of(config, B, T)
    found, pairs = each(rows), 2 * B * T
    for layer, kind in enumerate(("experts", "ffn", "experts", "ffn")):
        assert found[f"decoder.{layer}.{kind}"].makes == ((B, T, 16),)
    expected = {
        "router": (("[B, T, D]",), ("[B, T, E]",), 2 * B * T * 16 * 6),
        "up": (("[M, D]",), ("[M, X]",), 2 * pairs * 16 * 20),
        "gate": (("[M, D]",), ("[M, X]",), 2 * pairs * 16 * 20),
        "down": (("[M, X]",), ("[M, D]",), 2 * pairs * 16 * 20),
        "shared up": (("[B, T, D]",), ("[B, T, Y]",), 2 * B * T * 16 * 10),
        "shared gate": (("[B, T, D]",), ("[B, T, Y]",), 2 * B * T * 16 * 10),
        "shared down": (("[B, T, Y]",), ("[B, T, D]",), 2 * B * T * 16 * 10),
    }
    products = {name: found[f"decoder.2.experts.{name}"] for name in expected}
    assert expected == {
        name: (row.reads_symbols, row.makes_symbols, row.flops) for name, row in products.items()
    }
    assert found["decoder.2.experts"].flops == sum(row.flops for row in products.values())
    assert sum(row.times * row.parameters for row in rows) == parameter_count(config)
    flops = sum(row.times * row.flops for row in rows if not row.depth)
    assert 3 * flops == B * T * flops_per_token(config, T)
