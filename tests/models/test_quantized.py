"""A quantized leaf is the array that its codes stand for, wherever a weight is used, in a byte or
half a byte a weight; and nothing holds the whole model while it is quantized."""

import functools
import gc
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from custom_leaves import made
from families import LATENT, SIZES, VARIANTS, alone
from family_runs import TOKENIZER, printed, write_run
from products import slow_but

import jaxformer as jf
from jaxformer.adapters.quantized import NF4_VALUES, QUANTIZERS, nf4_rows, to_int8, to_nf4
from jaxformer.arrays.params import Spec, contract, dotted, is_custom, lookup, rows, zeros
from jaxformer.config.settings import with_settings
from jaxformer.interop import pretrained
from jaxformer.models.quantize import is_quantized
from jaxformer.models.transformer import specs
from jaxformer.runs import loading
from jaxformer.runs.model_files import ModelFiles
from jaxformer.runs.run_evaluation import evaluate_run

HERE = Path(__file__).parents[1]
KINDS = ("int8", "nf4")
EXPERTS = {
    "feed_forward": "experts",
    "experts.n": 4,
    "experts.per_token": 2,
    "experts.d_ff": 12,
    "experts.router_bias": "balanced",
}
MODELS = {
    "decoder": {"tied_head": True, "window": 3, "window_pattern": "wf"},
    "encoder": {"family": "encoder", "embedding.token_types": 2, "layer_loop": "scan"},
    "encoder-decoder": {"family": "encoder_decoder", "positions": "t5", "bias": "all"},
    "bfloat16": {"dtype": "bfloat16", "activation": "gelu", "positions": "learned"},
    "experts": EXPERTS | {"experts.dense_layers": 1, "experts.shared_ff": 8},
}
forward = jax.jit(jf.forward, static_argnums=1)
each_kind = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def case(name, kind):
    """(quantized params, config, batch); the params they were made of are those of `start`."""
    settings = MODELS[name.removesuffix(", scanned")]
    if name.endswith("scanned"):
        settings = settings | {"layer_loop": "scan"}
    config = with_settings(jf.ModelConfig(), SIZES | settings)
    return jf.quantize(start(config), kind), config, alone(config)


@functools.cache
def start(config):
    return jax.jit(jf.init, static_argnums=0)(config, jax.random.key(0))


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def row(shape, axes, inputs, lookup=False):
    return Spec(shape, tuple(axes.split()), zeros, tuple(inputs.split()), lookup=lookup)


ROWS = {  # a row, and the axes that share a scale
    "into heads": (row((3, 24, 4, 5), "layers embed heads head_dim", "embed"), (1,)),
    "out of heads": (row((3, 4, 5, 24), "layers heads head_dim embed", "heads head_dim"), (1, 2)),
    "head": (row((37, 24), "vocab embed", "embed"), (1,)),
    "embedding": (row((37, 24), "vocab embed", "vocab", lookup=True), (1,)),
    "experts": (row((3, 4, 24, 8), "layers experts embed mlp", "embed"), (2,)),
    "one layer of experts": (row((4, 24, 8), "experts mlp embed", "mlp"), (1,)),
}


@pytest.mark.parametrize("name", ROWS)
def test_int8_codes_are_round_of_the_weight_over_its_channels_scale(name):
    spec, shared = ROWS[name]
    weight = drawn(*spec.shape)
    weight[0, 0] = 0
    found = jax.jit(to_int8, static_argnums=1)(jnp.asarray(weight), spec)
    scale = np.abs(weight).max(shared, keepdims=True) / np.float32(127)
    codes = np.round(weight / np.where(scale > 0, scale, 1))
    np.testing.assert_array_equal(found.scale, scale)
    np.testing.assert_array_equal(found.codes, codes.astype(np.int8))
    np.testing.assert_array_equal(found.array(), codes.astype(np.float32) * scale)
    assert found.codes.dtype == jnp.int8 and np.abs(found.codes).max() == 127
    parts = jax.tree.map(lambda part: (part.shape, str(part.dtype)), found)
    table = jax.tree.map(lambda part: (part.shape, part.dtype), QUANTIZERS["int8"].rows(spec))
    assert parts == table and found.shape == spec.shape and found.ndim == len(spec.shape)


def test_int8_rounds_half_to_even_and_a_channel_of_zeros_stays_zero():
    halves = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127], np.float32)
    weight = jnp.asarray(np.stack([halves, np.zeros(8, np.float32)], 1))
    found = to_int8(weight, row((8, 2), "embed mlp", "embed"))
    assert found.codes[:, 0].tolist() == [0, 2, 2, 0, -2, -2, 126, 127]
    assert found.scale.tolist() == [[1, 0]] and not np.any(found.array()[:, 1])


@pytest.mark.parametrize("shape, double", [((3, 24, 4, 5), True), ((2, 3, 7), False)])
def test_nf4_codes_are_the_nearest_of_each_block_two_to_a_byte(shape, double):
    weight = drawn(*shape)
    spec = row(shape, "layers embed heads head_dim"[: -9 if len(shape) < 4 else None], "embed")
    found = to_nf4(jnp.asarray(weight), spec, double)
    flat = np.pad(weight.reshape(shape[0], -1), ((0, 0), (0, -weight[0].size % 64)))
    blocks = flat.reshape(shape[0], -1, 64)
    absmax = np.abs(blocks).max(-1)
    apart = np.abs((blocks / absmax[..., None])[..., None] - NF4_VALUES.astype(np.float64))
    codes = apart.argmin(-1)
    np.testing.assert_array_equal(found.codes, codes[..., ::2] * 16 + codes[..., 1::2])
    if double:
        assert found.absmax.dtype == jnp.uint8
        spread = np.abs(absmax - absmax.mean(-1, keepdims=True)).max()
        np.testing.assert_allclose(found.maxima(), absmax, atol=0.02 * spread)
    else:
        np.testing.assert_array_equal(found.absmax, absmax)
    values = NF4_VALUES[codes] * np.asarray(found.maxima())[..., None]
    flat = values.reshape(shape[0], -1)[:, : weight[0].size]
    np.testing.assert_array_equal(found.array(), flat.reshape(shape))
    parts = jax.tree.map(lambda part: (part.shape, str(part.dtype)), found)
    assert parts == jax.tree.map(lambda part: (part.shape, part.dtype), nf4_rows(spec, double))
    assert found.shape == nf4_rows(spec, double).shape == shape and found.ndim == len(shape)


@pytest.mark.parametrize("kind", slow_but(QUANTIZERS, "int8", "nf4"))
def test_each_expert_is_quantized_by_itself(kind):
    """Neither a scale nor a block has numbers of two experts, or of two layers."""
    quantizer, size = QUANTIZERS[kind], (3, 7)  # no multiple of a block
    spec = row((2, 2, *size), "layers experts embed mlp", "embed")
    weight = jnp.asarray(drawn(*spec.shape) * 10.0 ** np.arange(4).reshape(2, 2, 1, 1))
    found, one = quantizer.make(weight, spec), row(size, "embed mlp", "embed")
    shapes = jax.tree.map(lambda part: (part.shape, str(part.dtype)), found)
    assert shapes == jax.tree.map(lambda part: (part.shape, part.dtype), quantizer.rows(spec))
    for layer, expert in itertools.product(range(2), range(2)):
        leaf = jax.tree.map(lambda part, at=(layer, expert): part[at], found)
        wanted = quantizer.make(weight[layer, expert], one)
        jax.tree.map(np.testing.assert_array_equal, leaf, wanted)
        np.testing.assert_array_equal(found.array()[layer, expert], wanted.array())


def test_a_weight_takes_a_byte_or_half_of_one():
    spec = row((2, 512, 256), "layers embed mlp", "embed")
    weight = jnp.asarray(drawn(*spec.shape))
    bytes_of = lambda leaf: sum(part.nbytes for part in jax.tree.leaves(leaf)) / weight.size  # noqa: E731
    assert bytes_of(to_int8(weight, spec)) < 1.01
    assert bytes_of(to_nf4(weight, spec)) == 0.5 + 4 / 64
    assert 0.5 + 1 / 64 < bytes_of(to_nf4(weight, spec, double=True)) < 0.517


LOGITS = [*zip(MODELS, itertools.cycle(KINDS)), ("decoder, scanned", "nf4")]


@pytest.mark.parametrize("name, kind", slow_but(LOGITS, LOGITS[1], LOGITS[4]))
def test_logits_are_those_of_the_arrays_bit_for_bit(name, kind):
    params, config, batch = case(name, kind)
    expected = forward(made(params), config, **batch)
    np.testing.assert_array_equal(forward(params, config, **batch), expected)
    plain = forward(start(config), config, **batch)
    apart = jnp.abs(expected - plain).mean() / plain.std()
    assert 0 < apart < (0.02 if kind == "int8" else 0.3)


@pytest.mark.parametrize("kind", slow_but(KINDS, "nf4"))
def test_a_scan_over_layers_holds_the_arrays_of_one_layer(kind):
    wide = {"d_model": 64, "d_ff": 256, "n_layers": 8, "layer_loop": "scan"}
    config = with_settings(jf.ModelConfig(), SIZES | wide)
    params = jf.quantize(start(config), kind)
    program = forward.lower(params, config, np.zeros((1, 4), int)).compile()
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(start(config)["blocks"]))
    assert program.memory_analysis().temp_size_in_bytes < arrays / 2

    def total(embed):
        return jf.forward(params | {"embed": embed}, config, np.zeros((1, 4), int)).sum()

    backward = jax.jit(jax.grad(total)).lower(start(config)["embed"]).compile()
    assert backward.memory_analysis().temp_size_in_bytes < arrays / 2


def test_the_new_tokens_are_those_of_the_arrays():
    params, config, batch = case("encoder-decoder", "int8")
    prompt, source = batch["tokens"], batch.get("source")
    found = jf.generate(params, config, prompt, 5, temperature=0, source=source)
    expected = jf.generate(made(params), config, prompt, 5, temperature=0, source=source)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "make, width",
    [(to_int8, 16), (functools.partial(to_nf4, double=True), 64)],
    ids=["int8", "nf4 double by rows"],
)
def test_a_table_that_is_looked_up_and_the_head_it_is_tied_to_are_those_of_the_array(make, width):
    settings = {"d_model": width, "n_layers": 1, "tied_head": True, "positions": "learned"}
    config = with_settings(jf.ModelConfig(), {**SIZES | settings, "dtype": "bfloat16"})
    table, params, batch = specs(config), start(config), alone(config)
    for part in ("tokens", "positions"):
        leaf = make(params["embed"][part], table["embed"][part])
        params = params | {"embed": params["embed"] | {part: leaf}}
    expected = forward(made(params), config, **batch)
    np.testing.assert_array_equal(forward(params, config, **batch), expected)
    leaf = params["embed"]["tokens"].astype(jnp.bfloat16)
    found = jax.jit(lambda leaf: lookup(leaf, batch["tokens"], ("batch", None, None)))(leaf)
    np.testing.assert_array_equal(found, leaf.array()[batch["tokens"]])
    assert found.dtype == jnp.bfloat16


@pytest.mark.parametrize("make", [to_int8, to_nf4, functools.partial(to_nf4, double=True)])
def test_an_optimizing_compiler_joins_no_addition_with_the_product_of_a_leaf(make):
    """A fused multiply-add rounds once where the array, made before it, was rounded as well."""
    leaf = make(jnp.asarray(drawn(37, 64)), row((37, 64), "vocab embed", "vocab", lookup=True))
    index, more = np.arange(37)[::-1], drawn(37, 64, seed=1)
    optimized = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})
    add = optimized(lambda table: lookup(table, index, ("batch", None)) + more)
    np.testing.assert_array_equal(add(leaf), add(leaf.array()))
    np.testing.assert_array_equal(optimized(lambda leaf: leaf.array())(leaf), leaf.array())


@each_kind
def test_a_cast_changes_the_dtype_of_the_array_and_no_code(kind):
    params = case("decoder", kind)[0]
    leaf = params["blocks"]["ffn"]["up"]
    cast = leaf.astype(jnp.bfloat16)
    for part, same in zip(jax.tree.leaves(cast), jax.tree.leaves(leaf), strict=True):
        assert part is same
    np.testing.assert_array_equal(cast.array(), leaf.array().astype(jnp.bfloat16))
    half = jf.quantize(jax.tree.map(lambda a: a.astype(jnp.bfloat16), made(params)), kind)
    assert half["blocks"]["ffn"]["up"].array().dtype == jnp.bfloat16


CONFIGS = {
    "sinks": VARIANTS["scores"]["sinks"],
    "norms of heads": VARIANTS["query_key_norm"]["head"],
    "no norm": VARIANTS["norm"]["none"],
    "gated, without biases": MODELS["decoder"] | {"attention.value_dim": 6},
    "encoder": MODELS["encoder"] | {"activation": "gelu", "bias": "all"},
    "encoder-decoder": MODELS["encoder-decoder"],
    "experts": MODELS["experts"],
    "experts with biases": MODELS["experts"] | {"activation": "gelu", "bias": "all"},
    "latents": LATENT,
}


@each_kind
def test_every_matrix_of_the_blocks_is_quantized_by_its_row_and_in_int8_those_of_tokens(kind):
    for name, settings in CONFIGS.items():
        config = with_settings(jf.ModelConfig(), SIZES | settings)
        table = specs(config)

        def expected(spec):
            return QUANTIZERS[kind].rows(spec) if is_quantized(spec, kind) else spec

        is_row = lambda node: isinstance(node, Spec)  # noqa: E731
        wanted = jax.tree.map(expected, table, is_leaf=is_row)
        params = jax.eval_shape(lambda config=config: jf.init(config, jax.random.key(0)))
        found = jax.eval_shape(lambda params: jf.quantize(params, kind), params)
        shapes = jax.tree.map(lambda part: (part.shape, str(part.dtype)), found)
        assert shapes == jax.tree.map(lambda part: (part.shape, part.dtype), wanted), name
        leaves = jax.tree.leaves_with_path(found, is_leaf=is_custom)
        quantized = {dotted(path) for path, leaf in leaves if is_custom(leaf)}
        matrices = {
            path
            for path, spec in rows(table).items()
            if spec.is_matrix and "layers" in spec.axes and not path.endswith("experts.router")
        }
        if kind == "int8":
            matrices |= {"embed.tokens", "head.weight"} & set(rows(table))
        assert quantized == matrices and quantized, name


@each_kind
def test_gradients_flow_through_a_leaf_and_none_into_it(kind):
    params, config, _ = case("decoder", kind)
    layer = jax.tree.map(lambda part: part[0], params["blocks"]["ffn"]["up"])
    x = drawn(2, 3, config.d_model)
    found = jax.grad(lambda x: jnp.square(contract("BTD,DF->BTF", x, layer)).sum())(x)
    dense = layer.array()
    expected = jax.grad(lambda x: jnp.square(contract("BTD,DF->BTF", x, dense)).sum())(x)
    np.testing.assert_array_equal(found, expected)
    into = jax.grad(lambda leaf: contract("BTD,DF->BTF", x, leaf).sum(), allow_int=True)(layer)
    for part in jax.tree.leaves(into):
        assert part.dtype == jax.dtypes.float0 or not np.any(part)


@pytest.mark.parametrize("kind", slow_but(KINDS, "nf4"))
def test_a_step_leaves_quantized_leaves_as_they_are_and_trains_the_rest(kind):
    params, config, batch = case("decoder", kind)
    batch = batch | {"targets": batch["tokens"], "weights": jnp.ones(batch["tokens"].shape)}
    optimizer = optax.adamw(1e-2, weight_decay=0.5)
    state = jf.init_state(params, optimizer)
    after, metrics = jf.make_step(jf.loss_of("causal", config), optimizer)(state, batch)
    assert metrics["grad_norm"] > 0
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), after.params, params)
    for leaf in jax.tree.leaves(moved, is_leaf=is_custom):
        assert any(jax.tree.leaves(leaf)) != is_custom(leaf)


def refused(match, params, kind="int8"):
    with pytest.raises(jf.ConfigError, match=match):
        jf.quantize(params, kind)


def test_what_cannot_be_quantized_is_refused_by_name(tmp_path):
    params = start(with_settings(jf.ModelConfig(), SIZES))
    refused("quantize='int4' is not one of 'int8', 'int8_blocks', 'nf4'", params, "int4")
    refused(r"blocks\.attention\.k is a Int8Weight already", jf.quantize(params, "int8"), "nf4")
    refused("these params have no blocks", {"w": jnp.ones((4, 4))})
    own = {"blocks": {"mixer": {"w": jnp.ones((2, 4, 4))}}}
    refused(r"blocks\.mixer\.w \[2, 4, 4\] is no leaf of the blocks of this package", own)
    for bad in (np.nan, np.inf):
        broken = jax.tree.map(lambda leaf: leaf, params)
        broken["blocks"]["ffn"]["up"] = params["blocks"]["ffn"]["up"].at[1, 2, 3].set(bad)
        for kind in KINDS:
            refused(r"blocks\.ffn\.up has numbers that are not finite", broken, kind)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(jf.ConfigError, match="quantize='int3' is not one of 'int8', 'int8_blocks'"):
        jf.load(tmp_path, quantize="int3")


WIDE = {"d_model": 64, "n_kv_heads": 4, "d_ff": 128, "n_layers": 4}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """The same wide model as a Hugging Face directory and as a run directory."""
    folder = tmp_path_factory.mktemp("quantized")
    config = with_settings(jf.ModelConfig(), SIZES | WIDE)
    jf.save_pretrained(folder / "hf", start(config), config, dtype="float32")
    loading.save_run(folder / "run", jf.load(folder / "hf"), ModelFiles(folder / "hf"))
    return {"hf": (folder / "hf", pretrained), "run": (folder / "run", loading)}


def alive():
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.slow
@pytest.mark.parametrize("source, kind", [("hf", "int8"), ("run", "nf4")])
def test_a_model_is_quantized_leaf_by_leaf_while_it_is_read(source, kind, directories, monkeypatch):
    path, module = directories[source]
    seen, quantized = [], module.quantized_leaf

    def watched(*arguments):
        seen.append(alive() - before)
        return quantized(*arguments)

    monkeypatch.setattr(module, "quantized_leaf", watched)
    gc.collect()
    before = alive()
    found = jf.load(path, quantize=kind)
    gc.collect()
    kept, largest = alive() - before, 4 * WIDE["n_layers"] * WIDE["d_model"] * WIDE["d_ff"]
    whole = jf.load(path)
    assert len(seen) == (9 if kind == "int8" else 7) and max(seen) < kept + 1.1 * largest
    assert kept + 1.1 * largest < sum(leaf.nbytes for leaf in jax.tree.leaves(whole.params)) / 1.5
    jax.tree.map(np.testing.assert_array_equal, found.params, jf.quantize(whole.params, kind))
    assert found.config == whole.config
    half = jf.load(path, quantize=kind, dtype="bfloat16").params
    assert half["blocks"]["ffn"]["up"].array().dtype == half["head"]["weight"].dtype == "bfloat16"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("commands") / "run", "decoder")


@pytest.mark.slow
def test_sample_writes_what_the_quantized_model_writes(run, capsys):
    kind = "int8"
    model = jf.load(run, quantize=kind)
    assert any(map(is_custom, jax.tree.leaves(model.params, is_leaf=is_custom)))
    prompt = TOKENIZER.encode("the cat")
    rules = {"end_token": TOKENIZER.end_token, "vocab_size": TOKENIZER.vocab_size}
    wanted = jf.generate(model.params, model.config, [prompt], 8, temperature=0, **rules)
    line = ("sample", run, "--prompt", "the cat", "--max_new_tokens", 8, "--temperature", 0)
    text = TOKENIZER.decode([*prompt, *wanted[0].tolist()])
    assert printed(capsys, *line, "--quantize", kind) == text + "\n"


@pytest.mark.slow
def test_evaluate_prints_the_loss_beside_that_of_the_unquantized_model(run, capsys):
    kind = "nf4"
    text = run.with_name("text.txt")
    text.write_text("the cat sees a dog under the tall tree\n" * 20)
    line = ("evaluate", run, "--data.validation", text)
    plain = printed(capsys, *line)
    lines = printed(capsys, *line, "--quantize", kind).splitlines()
    assert lines[0] == f"unquantized: {plain.strip()}" and len(lines) == 2
    found, whole = (evaluate_run(run, str(text), quantize=chosen) for chosen in (kind, None))
    assert lines[1].startswith(f"{kind}: validation loss {found['val_loss']:.4f} nats per target")
    assert 0 < abs(found["val_loss"] - whole["val_loss"]) < 0.5


MESHES = """
import json, sys
import jax, numpy as np
import jaxformer as jf
from jaxformer.arrays.mesh import batch_sharding, parameter_sharding
from jaxformer.models.transformer import specs
from jaxformer.arrays.params import init_params, map_specs

config = jf.ModelConfig(vocab_size=64, d_model=64, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=256)
table, report = specs(config), []
params = init_params(table, jax.random.key(0))
jf.save_pretrained(sys.argv[1], params, config)
tokens = np.random.default_rng(0).integers(0, 64, (8, 12))
forward = jax.jit(jf.forward, static_argnums=1)
equal = lambda a, b: all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))
for kind, explicit in (("int8", True), ("nf4", False)):
    alone = jf.quantize(params, kind)
    expected = np.asarray(forward(alone, config, tokens))
    mesh = jf.make_mesh(2, 2, 2, explicit=explicit)
    with jax.set_mesh(mesh):
        put = lambda _, row: parameter_sharding(mesh, row.shape, row.axes)
        placed = jax.tree.map(jax.device_put, params, map_specs(put, table))
        found = jf.quantize(placed, kind)
        logits = forward(found, config, jax.device_put(tokens, batch_sharding(mesh)))
    leaves = jax.tree.leaves(found["blocks"]["ffn"])
    report.append({
        "equal": equal(found, alone),
        "logits": float(np.abs(logits - expected).max()),
        "split": min(leaf.size // leaf.addressable_shards[0].data.size for leaf in leaves),
        "loaded": equal(jf.load(sys.argv[1], mesh=mesh, quantize=kind).params, alone),
    })
print(json.dumps(report))
"""


@pytest.mark.slow
@pytest.mark.xdist_group("eight devices")
def test_sharded_params_are_quantized_where_they_are_and_give_the_same_logits(tmp_path):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    changes = {"XLA_FLAGS": flags, "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, "-c", MESHES, str(tmp_path / "model")]
    done = subprocess.run(command, env=os.environ | changes, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert len(report) == 2
    for found in report:
        assert found["equal"] and found["loaded"] and found["split"] == 2
        assert found["logits"] < 2e-6
