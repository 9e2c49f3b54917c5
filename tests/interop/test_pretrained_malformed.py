"""A directory that is not what it says gets one message that names the file and the tensor or key;
a model that cannot be stated is refused before a file is written."""

import json
import shutil

import jax
import pytest
import torch
from pretrained import directory, rewrite
from products import slow_but
from safetensors.torch import load_file, save_file

import jaxformer as jf
from jaxformer.arrays.params import Spec, zeros
from jaxformer.config.settings import with_settings
from jaxformer.interop.pretrained import pretrained_config
from jaxformer.layers.norm import NORMS, NormRow
from jaxformer.layers.positions import FREQUENCIES, rope_frequencies
from jaxformer.tokenizer import Tokenizer

ONE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def place(tmp_path):
    return shutil.copytree(directory("llama"), tmp_path / "model")


def changed(place, changes):
    """The directory with tensors put into its file, or taken out where they are None."""
    held = load_file(place / ONE) | changes
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, place / ONE)


def config_of(text):
    return lambda place: (place / CONFIG).write_text(text)


def keys(**fields):
    return lambda place: rewrite(place, **fields)


def tensors(changes):
    return lambda place: changed(place, changes)


def transposed(place):
    changed(place, {UP: load_file(place / ONE)[UP].T.contiguous()})


def with_tied_tensors_of(*shape):
    """An embedding, and an output layer that repeats it, of a shape that neither can have."""

    def spoil(place):
        rewrite(place, tie_word_embeddings=True)
        changed(place, {name: torch.zeros(shape) for name in (EMBEDDING, "lm_head.weight")})

    return spoil


LONG = dict(rope_type="longrope", short_factor=[1.0] * 5, long_factor=[2.0] * 5)
EMBEDDING = "model.embed_tokens.weight"
ANOTHER = {"model.layers.1.mlp.extra_proj.weight": torch.zeros(3)}
THREE = ANOTHER | {UP: None, "model.norm.weight": torch.zeros(43)}
# What is done to a tiny Llama, and what the one message has to name.
MALFORMED = {
    "a wrong shape": (transposed, [ONE, UP, "53", "42"]),
    "a missing tensor": (tensors({UP: None}), [ONE, UP]),
    "an extra tensor": (tensors(ANOTHER), [ONE, "model.layers.1.mlp.extra_proj.weight"]),
    "all three": (tensors(THREE), [ONE, UP, "extra_proj", "model.norm.weight", "43"]),
    "single numbers": (with_tied_tensors_of(), [ONE, EMBEDDING, "[71, 42]"]),
    "no numbers": (with_tied_tensors_of(71, 0), [ONE, EMBEDDING, "[71, 0]", "[71, 42]"]),
    "whole numbers": (tensors({UP: torch.zeros(53, 42, dtype=torch.int8)}), [ONE, UP]),
    "no config": (lambda place: (place / CONFIG).unlink(), [CONFIG]),
    "a config that is no JSON": (config_of("{'hidden_size': 42"), [CONFIG]),
    "a config that is a list": (config_of("[1]"), [CONFIG]),
}
KEYS = [  # keys of its config.json, and what the message has to name
    (dict(num_hidden_layers=3), [ONE, "model.layers.2.mlp.up_proj.weight"]),
    (dict(hidden_size=36), [ONE, EMBEDDING, "42", "36"]),
    (dict(num_key_value_heads=4), [CONFIG, "num_key_value_heads"]),
    (dict(hidden_size="42"), [CONFIG, "hidden_size"]),
    (dict(num_hidden_layers=1.5), [CONFIG, "num_hidden_layers"]),
    (dict(attention_bias=True), [ONE, "model.layers.0.self_attn.q_proj.bias"]),
    (dict(tie_word_embeddings="yes"), [CONFIG, "tie_word_embeddings"]),
    (dict(architectures=["Mamba"], model_type="mamba"), [CONFIG, "Mamba"]),
    (dict(architectures=["LlamaForSequenceClassification"]), [CONFIG, "ForSequenceClassification"]),
    (dict(architectures=None, model_type=None), [CONFIG, "architectures"]),
    (dict(architectures=["GPT2LMHeadModel"]), [CONFIG, 'model_type="llama"', "config.json again"]),
    (dict(hidden_act="foo"), [CONFIG, "hidden_act", "foo"]),
    (dict(rope_parameters=LONG), [CONFIG, "longrope"]),
    (dict(rope_parameters=dict(rope_type="yarn", factor=2.0, truncate=1)), [CONFIG, "truncate"]),
    (dict(rope_parameters="linear"), [CONFIG, "rope_parameters"]),
    (dict(quantization_config={"quant_method": "gptq"}), [CONFIG, "quantization_config"]),
]
CASES = [pytest.param(*case, id=name) for name, case in MALFORMED.items()]
CASES += [pytest.param(keys(**fields), named, id=str(fields)) for fields, named in KEYS]


@pytest.mark.xdist_group("llama")
@pytest.mark.parametrize("spoil, named", CASES)
def test_a_malformed_directory_gets_one_message_that_names_the_file_and_what_is_in_it(
    spoil, named, place
):
    spoil(place)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    with pytest.raises(jf.ConfigError) as told:
        jf.load(place)
    missing = [word for word in named if word not in str(told.value)]
    assert not missing, f"{missing} in: {told.value}"
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before


@pytest.mark.parametrize(
    "name",
    [
        *("gpt2", "llama", "qwen3 bias, window by layer types", "gemma2", "gemma3", "gpt-neox"),
        *("bloom", "bert masked", "roberta classes", "t5", "marian"),
    ],
)
def test_a_number_that_is_null_is_named_or_means_what_is_left_out(name, tmp_path):
    """What may be null, such as a head's width, follows from other keys then."""
    place = shutil.copytree(directory(name), tmp_path / "model")
    keys = json.loads((place / CONFIG).read_text())
    numbers = [key for key, value in keys.items() if type(value) in (int, float)]
    assert len(numbers) > 8
    refused = set()
    for key in numbers:
        (place / CONFIG).write_text(json.dumps(keys | {key: None}))
        try:
            pretrained_config(place)
        except jf.ConfigError as error:
            assert key in str(error) and "NoneType" not in str(error)
            refused.add(key)
    scales = {"rope_theta", "rotary_emb_base", "query_pre_attn_scalar"} & {*numbers}
    assert refused >= scales and len(refused) > 3


def test_a_giant_number_in_a_table_or_a_version_is_no_failure_of_ours(tmp_path):
    place = shutil.copytree(directory("mistral"), tmp_path / "model")
    keys = json.loads((place / CONFIG).read_text())
    (place / CONFIG).write_text(json.dumps(keys | {"transformers_version": "9" * 5000}))
    Tokenizer.from_bpe({i: bytes([i]) for i in range(256)}, [], ["[INST]"], "llama3").save(place)
    Tokenizer.load(place)
    table = {"rope_type": "linear", "factor": float("nan")}
    (place / CONFIG).write_text(json.dumps(keys | {"rope_scaling": table}))
    with pytest.raises(jf.ConfigError, match=r"rope_parameters\.factor=NaN"):
        pretrained_config(place)
    (place / CONFIG).write_text(json.dumps(keys | {"rope_scaling": table | {"factor": 10**400}}))
    with pytest.raises(jf.ConfigError):
        pretrained_config(place)


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(jf.ConfigError, match="nowhere"):
        jf.load(tmp_path / "nowhere")


SMALL = dict(vocab_size=71, d_model=24, n_layers=1, n_heads=2)
LLAMA, GPT2, MIXTRAL = "LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM"
ROUTED = {"feed_forward": "experts", "experts.n": 4}
# Models of ours that an architecture does not state, and the fields that are in the way.
UNSTATED = {
    "sinks": (LLAMA, {"attention.sinks": True}, ["attention.sinks"]),
    "a capacity of experts": (MIXTRAL, ROUTED | {"experts.capacity": 1.5}, ["experts.capacity"]),
    "scores of experts by a sigmoid": (
        MIXTRAL,
        ROUTED | {"experts.router": "sigmoid", "experts.router_bias": "balanced"},
        ["experts.router=", "experts.router_bias="],
    ),
    "two at once": (
        LLAMA,
        {"attention.sinks": True, "head.scale": "rsqrt"},
        ["attention.sinks", "head.scale"],
    ),
    "classes of the mean": (
        LLAMA,
        {"head.kind": "classes", "head.n_classes": 3, "head.pooling": "mean"},
        ["head"],
    ),
    "another family": (GPT2, {}, ["positions"]),
    "an unknown class": ("MambaForCausalLM", {}, ["MambaForCausalLM"]),
}


@pytest.mark.parametrize("case", slow_but(UNSTATED, "a capacity of experts", "two at once"))
def test_a_model_that_no_architecture_states_is_refused_with_the_fields_in_the_way(case, tmp_path):
    architecture, fields, words = UNSTATED[case]
    config = with_settings(jf.ModelConfig(), SMALL | fields)
    params = jf.init(config, jax.random.key(0))
    with pytest.raises(jf.ConfigError) as error:
        jf.save_pretrained(tmp_path / "out", params, config, architecture=architecture)
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} in: {error.value}"
    if fields and case != "two at once":
        with pytest.raises(jf.ConfigError, match=r"no Hugging Face .* name one, .* what it lacks"):
            jf.save_pretrained(tmp_path / "out", params, config)
    assert not (tmp_path / "out").exists()


def test_a_norm_or_a_scaling_of_ones_own_is_a_field_in_the_way_and_no_fault(tmp_path, monkeypatch):
    def run(params, config, x):
        return x / abs(x).max(-1, keepdims=True) + params["bias"]

    def bias(config):
        return {"bias": Spec((config.d_model,), ("norm",), zeros)}

    monkeypatch.setitem(NORMS, "largest", NormRow(bias, run))
    monkeypatch.setitem(FREQUENCIES, "halved", lambda c, _: rope_frequencies(c.rotated_width, 2.0))
    for fields, named in (
        (dict(norm="largest"), "model.norm='largest'"),
        (dict(norm="largest", bias="all"), "model.norm='largest'"),
        ({"rope.scaling": "halved", "rope.factor": 2.0}, "halved"),
    ):
        config = with_settings(jf.ModelConfig(), SMALL | fields)
        params = jf.init(config, jax.random.key(0))
        with pytest.raises(jf.ConfigError, match=named):
            jf.save_pretrained(tmp_path / "out", params, config, architecture=LLAMA)
    assert not (tmp_path / "out").exists()


def test_parameters_of_another_config_are_refused_and_nothing_is_written(tmp_path):
    config = with_settings(jf.ModelConfig(), SMALL)
    params = jf.init(config, jax.random.key(0))
    params["blocks"].pop(next(iter(params["blocks"])))
    with pytest.raises(jf.ConfigError, match="missing"):
        jf.save_pretrained(tmp_path / "out", params, config)
    assert not [*tmp_path.glob("out/*")]
