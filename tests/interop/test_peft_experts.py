"""Adapters of experts and of their routers in peft's format: parameters of transformers' classes,
those of all experts of a layer in one."""

import itertools
import re

import jax
import numpy as np
import pytest
from peft_models import adapted, logits, noised, put_on, saved, settings_of, state
from pretrained import assert_close, directory, each, folder, inputs, loaded, reference, tensors
from pretrained import logits as theirs
from products import slow_but
from test_peft import assert_same_tensors, leaves_of, ours

import jaxformer as jf

# The parameters in transformers, and the modules of the attention beside them.
ROUTED = {
    "mixtral": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"),
    "qwen3-moe dense layers": ("gate_up_proj", "down_proj", "gate.weight"),
    "olmoe": ("experts.gate_up_proj", "experts.down_proj", "gate.weight"),
    "granite-moe": ("experts.gate_up_proj", "experts.down_proj", "router.weight"),
    "granite-moe-shared": ("experts.gate_up_proj", "experts.down_proj", "router.weight"),
    "gpt-oss": ("experts.gate_up_proj", "experts.down_proj", "router.weight"),
    "deepseek-v3": ("experts.gate_up_proj", "experts.down_proj", "gate.weight"),
}
ALL = {"gate", "up", "down", "router"}


def names_of(params):
    return {
        re.sub(r"^blocks\.(\d+\.)?(attention|latent|experts)\.", "", path)
        for path in leaves_of(params)
    }


@each(ROUTED, slow=ROUTED.keys() - {"mixtral"})
def test_an_adapter_of_experts_computes_what_it_does_in_peft_and_is_written_back(name):
    gate_up, down, router = ROUTED[name]
    model, place = saved(
        name,
        "experts",
        r=3,
        lora_alpha=7,
        target_modules=["o_proj"],
        target_parameters=[gate_up, down, router],
        rank_pattern={"experts.gate_up_proj": 2, "o_proj": 4},
        alpha_pattern={"down_proj": 2.5},
    )
    batch, found = inputs(name), jf.load(place)
    wanted = theirs(model, batch)
    assert np.abs(wanted - theirs(reference(name), batch)).max() > 0.5 * wanted.std()
    assert names_of(found.params) == ALL | {"out"}
    assert_close(ours(found, batch), wanted, batch)
    back = folder(name, "experts back")
    jf.save_adapter(back, found.params, found.config, base=directory(name))
    assert_same_tensors(tensors(back), tensors(place))
    again = put_on(name, back)
    np.testing.assert_allclose(theirs(again, batch), wanted, rtol=0, atol=1e-5 * wanted.std())


ONE = {
    "gate and up": (["gate_up_proj"], {"gate", "up"}),
    "down": (["down_proj"], {"down"}),
    "the router": (["gate.weight"], {"router"}),
    "one layer": (["model.layers.1.mlp.experts.gate_up_proj", "down_proj"], {"gate", "up", "down"}),
}


@pytest.mark.xdist_group("mixtral")
@pytest.mark.parametrize("case", slow_but(ONE, "gate and up"))
def test_the_parameters_are_those_of_target_parameters(case):
    """The name of a module in the file says how many of its parameters are adapted, not which."""
    parameters, names = ONE[case]
    model, place = saved("mixtral", case, target_modules=[], target_parameters=parameters, r=2)
    found, batch = jf.load(place), inputs("mixtral")
    assert names_of(found.params) == names
    assert_close(ours(found, batch), theirs(model, batch), batch)
    back = folder("mixtral", case, "back")
    jf.save_adapter(back, found.params, found.config)
    assert_same_tensors(tensors(back), tensors(place))
    assert_close(theirs(put_on("mixtral", back), batch), theirs(model, batch), batch)


@each(["mixtral", "qwen3-moe dense layers"], slow=["qwen3-moe dense layers"])
def test_names_of_single_experts_are_those_that_peft_makes_parameters_of(name):
    """target_modules as before transformers 5: peft writes them as target_parameters."""
    projections = {"mixtral": ["w1", "w2", "w3"]}.get(name, ["gate_proj", "up_proj", "down_proj"])
    model, place = saved(name, "single", target_modules=["q_proj", *projections], r=2)
    assert settings_of(place)["target_parameters"]
    found, batch = jf.load(place), inputs(name)
    assert names_of(found.params) == {"q", "gate", "up", "down"}
    assert_close(ours(found, batch), theirs(model, batch), batch)


@each(["mixtral", "gpt-oss", "granite-moe-shared"], slow=["gpt-oss", "granite-moe-shared"])
@pytest.mark.parametrize(
    "targets", [("experts", "attention"), pytest.param(("up", "down"), marks=pytest.mark.slow)]
)
def test_adapters_made_here_are_loaded_by_peft(name, targets):
    """Gates and ups that have an a of their own become one parameter of the sum of their ranks."""
    model, batch = loaded(name), inputs(name)
    lora = jf.LoRA(rank=2, alpha=5, targets=targets, alphas={"up": 3}, ranks={"up": 3}, dropout=0.1)
    if name == "granite-moe-shared":
        lora = jf.LoRA(rank=2, targets=(*targets, "shared"))
    params = noised(jf.adapt(model.params, model.config, lora, jax.random.key(0)))
    wanted = logits(model.config, params, batch)
    assert np.abs(wanted - logits(model.config, model.params, batch)).max() > 0.1 * wanted.std()
    place = folder(name, f"made {len(targets)} {targets[0]}")
    jf.save_adapter(place, params, model.config, base=directory(name))
    assert settings_of(place)["lora_dropout"] == 0
    assert_close(wanted, theirs(put_on(name, place), batch), batch)
    back, found = folder(name, f"made back {targets[0]}"), jf.load(place)
    assert_close(ours(found, batch), wanted, batch)
    jf.save_adapter(back, found.params, found.config)
    assert_same_tensors(tensors(back), tensors(place))


@pytest.mark.slow
def test_an_adapter_of_experts_over_a_quantized_base_and_of_some_layers():
    name = "qwen3-moe dense layers"
    model, batch = loaded(name), inputs(name)
    params = jf.quantize(model.params, "int8")
    lora = jf.LoRA(rank=2, targets=("blocks.1.experts.*", "blocks.1.attention.q"))
    params = noised(jf.adapt(params, model.config, lora, jax.random.key(0)))
    place = folder(name, "quantized")
    jf.save_adapter(place, params, model.config, base=directory(name))
    found = jf.load(place, quantize="int8")
    expected, leaves = leaves_of(params), leaves_of(found.params)
    assert expected.keys() == leaves.keys()
    for path, leaf in expected.items():
        np.testing.assert_allclose(leaves[path].product(), leaf.product(), atol=1e-6)
    np.testing.assert_allclose(ours(found, batch), logits(model.config, params, batch), atol=1e-4)


@pytest.mark.slow
@each(["qwen3-moe dense layers", "deepseek-v3"])
def test_layers_that_peft_takes_for_experts_are_parameters_of_an_adapter(name):
    """Dense layers and shared experts, by the names that experts had before transformers 5."""
    model, batch = loaded(name), inputs(name)
    others = ("experts", "latent") if name == "deepseek-v3" else ("attention",)
    lora = jf.LoRA(rank=2, targets=("ffn", *others), ranks={"up": 3})
    params = noised(jf.adapt(model.params, model.config, lora, jax.random.key(0)))
    wanted = logits(model.config, params, batch)
    assert np.abs(wanted - logits(model.config, model.params, batch)).max() > 0.1 * wanted.std()
    place = folder(name, "dense")
    jf.save_adapter(place, params, model.config, base=directory(name))
    assert "gate_proj.weight" in settings_of(place)["target_parameters"]
    assert_close(wanted, theirs(put_on(name, place), batch), batch)
    assert_close(ours(jf.load(place), batch), wanted, batch)


WRONG = {
    "a bias": (
        dict(target_parameters=["gate_up_proj_bias"]),
        r"mlp\.experts, .* nor are they parameters that target_parameters names",
    ),
    "one that the file lacks": (
        dict(target_parameters=["down_proj", "gate_up_proj", "router.weight"]),
        r"layers\.0\.mlp\.router\.lora_A\.weight: not in adapter_model",
    ),
}


@pytest.mark.xdist_group("gpt-oss")
@pytest.mark.parametrize("case", WRONG)
def test_an_adapter_that_does_not_fit_the_experts_is_refused_by_name(case, tmp_path):
    changes, match = WRONG[case]
    targets = ["gate_up_proj", "down_proj"]
    model = adapted(
        reference("gpt-oss"),
        directory("gpt-oss"),
        r=2,
        target_modules=[],
        target_parameters=targets,
    )
    model.save_pretrained(tmp_path)
    state(tmp_path, **changes)
    with pytest.raises(jf.ConfigError, match=match):
        jf.load(tmp_path)


def test_the_layout_of_all_experts_is_that_of_peft():
    """lora_A [E R, inputs] with the rows of an expert together, lora_B [outputs, R E] with those of
    a component together."""
    _, place = saved("mixtral", "down", target_modules=[], target_parameters=["down_proj"], r=2)
    stored, leaf = tensors(place), leaves_of(jf.load(place).params)["blocks.experts.down"]
    layers, experts = leaf.a.shape[:2]
    for layer, e in itertools.product(range(layers), range(experts)):
        name = f"base_model.model.model.layers.{layer}.mlp.experts"
        lora_a = stored[f"{name}.lora_A.weight"].numpy().reshape(experts, 2, -1)[e]
        lora_b = stored[f"{name}.lora_B.weight"].numpy().reshape(-1, 2, experts)[..., e]
        np.testing.assert_array_equal(leaf.a[layer, e], lora_a.T)
        np.testing.assert_array_equal(leaf.b[layer, e], lora_b.T)
