"""Adapters in peft's format: what peft computes with one is computed here, and what is written here
peft loads."""

import copy
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers as tf
from peft_models import (
    adapted,
    everywhere,
    linear_modules,
    logits,
    merge,
    noised,
    put_on,
    saved,
    settings_of,
    state,
)
from pretrained import (
    assert_close,
    batch_for,
    directory,
    each,
    folder,
    inputs,
    loaded,
    made,
    reference,
    tensors,
)
from pretrained import logits as theirs
from pretrained_variants import BERT, FAMILY, LLAMA, ROBERTA
from products import slow_but
from safetensors.torch import load_file, save_file

import jaxformer as jf
from jaxformer.adapters.low_rank import LowRank
from jaxformer.arrays.params import dotted, is_custom
from jaxformer.cli import main
from jaxformer.config.settings import with_settings
from jaxformer.runs.model_files import ModelFiles

ROOT = Path(__file__).parents[2]
# One module for queries, keys and values in transformers.
FUSED = ["gpt2", "gpt-neox", "bloom", "phi3", "falcon groups, two norms", "mpt"]
QV = dict(target_modules=["q_proj", "v_proj"], r=4, lora_alpha=6)


def ours(model, batch):
    return logits(model.config, model.params, batch)


def leaves_of(params):
    """The adapted leaves by path."""
    found = jax.tree.leaves_with_path(params, is_leaf=is_custom)
    return {dotted(path): leaf for path, leaf in found if isinstance(leaf, LowRank)}


def assert_same_tensors(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def without_base(held):
    """Tensors without those of the base, which peft saves with an adapter of an embedding."""
    return {name: tensor for name, tensor in held.items() if "base_layer" not in name}


@each(FAMILY.values(), slow={*FAMILY.values()} - {"llama", "falcon", "t5"})
def test_an_adapter_computes_what_it_does_in_peft_and_is_written_back_as_it_was(name):
    model, place = everywhere(name)
    batch, found = inputs(name), jf.load(place)
    wanted = theirs(model, batch)
    assert np.abs(wanted - theirs(reference(name), batch)).max() > 0.5 * wanted.std()
    assert found.base == directory(name) and found.config == loaded(name).config
    assert_close(ours(found, batch), wanted, batch)
    back = folder(name, "back")
    jf.save_adapter(back, found.params, found.config, base=directory(name))
    assert_same_tensors(tensors(back), tensors(place))
    again = put_on(name, back)
    scales = [
        {key: module.scaling["default"] for key, module in each.named_modules() if is_layer(module)}
        for each in (model, again)
    ]
    assert scales[0] == pytest.approx(scales[1], rel=1e-7)


@each(["llama", "gpt2", "falcon"], slow=["llama", "gpt2"])
def test_merged_weights_are_those_that_peft_merges(name):
    model, place = everywhere(name)
    found, merged = jf.load(place), folder(name, "merged")
    architecture = type(reference(name)).__name__
    jf.save_pretrained(merged, merge(found.params), found.config, architecture=architecture)
    copy.deepcopy(model).merge_and_unload().save_pretrained(folder(name, "merged theirs"))
    expected = tensors(folder(name, "merged theirs"))
    for key, tensor in tensors(merged).items():
        np.testing.assert_allclose(tensor, expected[key], rtol=1e-6, atol=1e-6, err_msg=key)


def is_layer(module):
    return isinstance(module, peft.tuners.lora.LoraLayer)


@each(FUSED, slow=FUSED[1:])
@pytest.mark.parametrize("targets", ["blocks.attention.*", "blocks.attention.[qv]"])
def test_adapters_of_queries_keys_and_values_become_one_of_the_module_that_they_are(name, targets):
    model, batch = loaded(name), inputs(name)
    lora = jf.LoRA(rank=2, alpha=5, targets=(targets,), alphas={"v": 3}, ranks={"q": 3})
    params = noised(jf.adapt(model.params, model.config, lora, jax.random.key(0)))
    wanted = logits(model.config, params, batch)
    place = folder(name, f"made {len(targets)}")
    jf.save_adapter(place, params, model.config, base=directory(name))
    theirs_now = theirs(put_on(name, place), batch)
    assert_close(wanted, theirs_now, batch)
    fused = 7 if targets.endswith("*") else 5
    assert fused in {len(t) for n, t in tensors(place).items() if "lora_A" in n}
    back, found = folder(name, "made back"), jf.load(place)
    assert_close(ours(found, batch), theirs_now, batch)
    jf.save_adapter(back, found.params, found.config)
    assert_same_tensors(tensors(back), tensors(place))


@each(["llama", "gpt2"])
def test_magnitudes_are_those_of_peft(name):
    """DoRA (arXiv:2402.09353), also of a module that is queries, keys and values."""
    modules = [module for module in linear_modules(reference(name)) if "1" in module]
    model, place = saved(name, "dora", use_dora=True, r=3, lora_alpha=7, target_modules=modules)
    batch, found = inputs(name), jf.load(place)
    wanted = theirs(model, batch)
    assert np.abs(wanted - theirs(reference(name), batch)).max() > 0.5 * wanted.std()
    assert_close(ours(found, batch), wanted, batch)
    assert_close(logits(found.config, merge(found.params), batch), wanted, batch)
    back = folder(name, "dora back")
    jf.save_adapter(back, found.params, found.config, base=directory(name))
    written, expected = tensors(back), tensors(place)
    assert expected.items() and written.keys() >= expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(tensor, written[key]), key
    assert_close(theirs(put_on(name, back), batch), wanted, batch)


@each(["llama", "gpt2"])
def test_an_adapter_made_here_with_magnitudes_and_principal_components_is_one_of_peft(name):
    model, batch = loaded(name), inputs(name)
    lora = jf.LoRA(rank=2, targets=("blocks.*.[qvu]*",), dora=True, init="pissa")
    params = noised(jf.adapt(model.params, model.config, lora, jax.random.key(0)))
    place = folder(name, "made with both")
    jf.save_adapter(place, params, model.config, base=directory(name))
    assert_close(logits(model.config, params, batch), theirs(put_on(name, place), batch), batch)


@pytest.mark.xdist_group("llama")
def test_the_initial_values_of_pissa_are_those_of_peft():
    """arXiv:2404.02948; a and b up to the signs of pairs, so that their product is compared."""
    model = loaded("llama")
    lora = jf.LoRA(rank=3, alpha=7, targets=("q",), init="pissa")
    leaf = jf.adapt(model.params, model.config, lora, jax.random.key(0))["blocks"]["attention"]["q"]
    settings = dict(r=3, lora_alpha=7, target_modules=["q_proj"], init_lora_weights="pissa")
    made = peft.get_peft_model(copy.deepcopy(reference("llama")), peft.LoraConfig(**settings))
    for layer, block in enumerate(made.base_model.model.model.layers):
        product = block.self_attn.q_proj.get_delta_weight("default").detach().numpy()  # [O, I]
        wide = np.tensordot(leaf.start_a[layer], leaf.start_b[layer], 1) * leaf.scale[layer]
        np.testing.assert_allclose(wide.reshape(len(wide), -1).T, product, atol=1e-5)
        np.testing.assert_array_equal(leaf.a, leaf.start_a)


TARGETS = {  # settings of peft, and the leaves of llama that they adapt
    "names": (QV, ["q", "v"]),
    "all linear layers": (
        dict(target_modules="all-linear"),
        ["q", "k", "v", "out", "gate", "up", "down"],
    ),
    "the output layer": (dict(target_modules=["lm_head"]), ["weight"]),
    "an embedding": (dict(target_modules=["embed_tokens", "q_proj"]), ["tokens", "q"]),
    "one layer": (QV | dict(layers_to_transform=[1]), ["q", "v"]),
}


@pytest.mark.xdist_group("llama")
@pytest.mark.parametrize("case", slow_but(TARGETS, "all linear layers", "an embedding"))
def test_the_targets_are_those_of_peft(case):
    settings, names = TARGETS[case]
    model, place = saved("llama", case, **settings)
    if settings["target_modules"] == "all-linear":  # peft writes the names that it stands for
        state(place, target_modules="all-linear")
    found, batch = jf.load(place), inputs("llama")
    assert {path.rpartition(".")[2] for path in leaves_of(found.params)} == set(names)
    assert_close(ours(found, batch), theirs(model, batch), batch)
    back = folder("llama", case, "back")
    jf.save_adapter(back, found.params, found.config)
    assert_same_tensors(tensors(back), without_base(tensors(place)))
    assert_close(theirs(put_on("llama", back), batch), theirs(model, batch), batch)


TABLES = {  # looked up, and the output layers beside them
    "bert masked": ("embed.types", "embed.positions", "head"),
    "t5 v1.1": ("relative_bias", "head"),
    "gemma2 untied": ("embed.tokens", "head"),
}


@each(TABLES, slow=["t5 v1.1", "gemma2 untied"])
def test_adapters_of_tables_and_heads_made_here_compute_the_same_in_peft(name):
    model, batch, place = loaded(name), inputs(name), folder(name, "tables")
    lora = jf.LoRA(rank=2, targets=TABLES[name])
    params = noised(jf.adapt(model.params, model.config, lora, jax.random.key(0)))
    jf.save_adapter(place, params, model.config, architecture=type(reference(name)).__name__)
    wanted = theirs(put_on(name, place), batch)
    assert np.abs(wanted - theirs(reference(name), batch)).max() > 0.5 * wanted.std()
    assert_close(logits(model.config, params, batch), wanted, batch)


@pytest.mark.xdist_group("gpt-neox")
@pytest.mark.parametrize("old", slow_but([False, True], True))
def test_the_output_layer_of_gpt_neox_has_its_names_of_two_versions(old):
    model, place = saved("gpt-neox", f"output {old}", target_modules=["lm_head"])
    back, found, batch = folder("gpt-neox", "output back"), jf.load(place), inputs("gpt-neox")
    jf.save_adapter(back, found.params, found.config)
    assert_same_tensors(tensors(back), without_base(tensors(place)))
    if old:
        held = {n.replace("lm_head", "embed_out"): t for n, t in tensors(place).items()}
        save_file(held, place / "adapter_model.safetensors")
        found = jf.load(state(place, target_modules=["embed_out"]))
    assert_close(ours(found, batch), theirs(model, batch), batch)


@pytest.mark.xdist_group("llama")
def test_components_that_are_zero_are_not_written():
    _, place = saved("llama", "padded", **QV, rank_pattern={"layers.0.self_attn.q_proj": 2})
    found = jf.load(place)
    leaf = leaves_of(found.params)["blocks.attention.q"]
    assert leaf.a.shape[-1] == 4 and not leaf.a[0, :, 2:].any() and not leaf.b[0, 2:].any()
    back = folder("llama", "trimmed")
    jf.save_adapter(back, found.params, found.config, base="somewhere/else")
    settings = settings_of(back)
    assert settings["r"] == 4 and settings["lora_alpha"] == 6
    assert settings["rank_pattern"] == {"model.layers.0.self_attn.q_proj": 2}
    assert settings["target_modules"] == ["q_proj", "v_proj"]
    assert settings["task_type"] == "CAUSAL_LM" and settings["modules_to_save"] is None
    assert settings["base_model_name_or_path"] == "somewhere/else"
    empty = jax.tree.map(jnp.zeros_like, leaf.replace(scale=jnp.ones(2)))
    params = jax.tree.map(lambda x: x, found.params)
    params["blocks"]["attention"]["q"] = empty.replace(weight=leaf.weight, scale=leaf.scale)
    jf.save_adapter(back, params, found.config)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert tensors(back)[name].shape == (1, 42)


@pytest.mark.parametrize("name", slow_but(["gpt2", "bert masked"], "bert masked"))
def test_an_adapter_of_the_class_without_a_head_is_the_same(name):
    """GPT2Model and BertModel, whose modules are named without the first part."""
    base = reference(name).base_model
    kind = "wpe" if name == "gpt2" else "query"
    rank = {rf"^(h|encoder\.layer)\.0\..*\.?{kind}": 2}
    settings = dict(target_modules=linear_modules(base)[:-1] + ["wpe"][name != "gpt2" :])
    model = adapted(base, directory(name), r=3, lora_alpha=4, rank_pattern=rank, **settings)
    place = folder(name, "headless")
    model.save_pretrained(place)
    assert not [n for n in tensors(place) if "transformer." in n or "bert." in n]
    whole, batch = copy.deepcopy(reference(name)), inputs(name)
    setattr(whole, whole.base_model_prefix, model.base_model.model)
    assert_close(ours(jf.load(place), batch), theirs(whole, batch), batch)


HEADS = {  # the class with a head of its own, over a base that has another one
    "bert masked": (tf.BertForSequenceClassification, BERT, "SEQ_CLS", ["pooler"]),
    "bert pre-training": (tf.BertForTokenClassification, BERT, "TOKEN_CLS", []),
    "roberta masked": (tf.RobertaForSequenceClassification, ROBERTA, "SEQ_CLS", []),
    "llama": (tf.LlamaForSequenceClassification, LLAMA | dict(num_labels=5), "SEQ_CLS", []),
}


@each(HEADS, slow=HEADS.keys() - {"bert masked"})
def test_a_head_that_the_adapter_brings_replaces_that_of_the_base(name):
    architecture, settings, task, more = HEADS[name]
    model = made(architecture, settings)
    base = getattr(reference(name), reference(name).base_model_prefix).state_dict()
    model.base_model.load_state_dict(base, strict=False)
    batch = batch_for(model)
    names = ["query", "value"] if "bert" in name else ["q_proj", "v_proj"]
    learned = {} if not more else {"modules_to_save": list(more)}
    model = adapted(model, directory(name), task_type=task, target_modules=names, **learned)
    place = folder(name, "with a head")
    model.save_pretrained(place)
    found = jf.load(place)
    wanted = "tags" if task == "TOKEN_CLS" else "classes"
    assert (found.config.output, found.config.head.n_classes) == (wanted, 5)
    assert_close(ours(found, batch), theirs(model, batch), batch)
    assert ModelFiles(place).config == found.config
    back = folder(name, "with a head", "back")
    jf.save_adapter(back, found.params, found.config, learned=tuple(more))
    assert_same_tensors(tensors(back), tensors(place))
    assert settings_of(back)["task_type"] == task
    plain = made(architecture, settings)
    plain.base_model.load_state_dict(base, strict=False)
    again = peft.PeftModel.from_pretrained(plain, back).eval()
    np.testing.assert_allclose(theirs(again, batch), theirs(model, batch), atol=1e-5)


@pytest.mark.xdist_group("llama")
def test_a_head_with_a_bias_or_a_soft_cap_is_not_written_for_a_decoder():
    config = jf.ModelConfig(
        vocab_size=16, d_model=16, n_heads=2, n_layers=1, head=jf.Head(kind="classes", n_classes=3)
    )
    params = jf.init(config, jax.random.key(0))
    params = jf.adapt(params, config, jf.LoRA(rank=2), jax.random.key(1))
    place = folder("llama", "biased")
    jf.save_adapter(place, params, config)
    assert settings_of(place)["modules_to_save"] == ["score"]
    biased = params | {"head": params["head"] | {"bias": jnp.ones(3)}}
    with pytest.raises(jf.ConfigError, match=r"head\.bias is not zero.* set it to zero"):
        jf.save_adapter(place, biased, config)
    with pytest.raises(jf.ConfigError, match=r"head.soft_cap=2\.0: set last and 0"):
        jf.save_adapter(place, params, with_settings(config, {"head.soft_cap": 2.0}))


WRONG = {  # changes of an adapter_config.json, and words of the message
    "a number that overflows": (dict(lora_alpha=10**400), "a number of 401 digits"),
    "one beyond float32": (dict(lora_alpha=1e38), r"lora_alpha=1e\+38 is not supported"),
    "a base at a URL": (
        dict(base_model_name_or_path="http://127.0.0.1:9/model"),
        r"is at 'http://127\.0\.0\.1:9/model', which whoever made .* jf\.load\(.*, base='http",
    ),
    "another method": (dict(peft_type="IA3"), r'peft_type="IA3" is not supported; .*"LORA"'),
    "DoRA without its magnitudes": (dict(use_dora=True), "lora_magnitude_vector: not in"),
    "no answer": (dict(use_dora=1), "use_dora=1 is not supported; supported: true or false"),
    "biases": (dict(bias="lora_only"), r'bias="lora_only" is not supported; supported: "none"'),
    "layers twice": (dict(layer_replication=[[0, 2]]), "layer_replication=.*false or null"),
    "single tokens": (dict(trainable_token_indices=[3]), "trainable_token_indices"),
    "of the future": (dict(use_something={"rate": 2}), r'use_something=\{"rate": 2\}'),
    "a base that changed": (dict(init_lora_weights="pissa_niter_4"), "initial_model_for_weight"),
    "a parameter": (dict(target_parameters="a"), "target_parameters=.* a list of names"),
    "an alpha": (dict(lora_alpha="4"), 'lora_alpha="4" .* a number'),
    "a dropout": (dict(lora_dropout=1.0), "lora_dropout=1.0 .* at least 0 and below 1"),
    "no expression": (dict(alpha_pattern={"q(": 4}), r"'q\(' is no regular expression .*missing"),
    "a deep one": (dict(alpha_pattern={"(" * 5000 + ")" * 5000: 4}), "RecursionError"),
    "an endless one": (
        dict(alpha_pattern={r"(.|..)*(.|..)*[!?]": 4}),
        r"alpha_pattern: '\(\..* no regular expression that can be matched .*timed out",
    ),
}


@pytest.fixture(scope="module")
def plain():
    return saved("llama", "plain", **QV)[1]


def copied(place, what, **changes):
    target = folder("llama", "copies", what)
    return state(shutil.copytree(place, target, dirs_exist_ok=True), **changes)


@pytest.mark.xdist_group("llama")
@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_computed_is_refused_by_name(case, plain, monkeypatch):
    monkeypatch.setattr("jaxformer.interop.peft_config.MATCH_SECONDS", 0.5)
    changes, message = WRONG[case]
    with pytest.raises(jf.ConfigError, match=message):
        jf.load(copied(plain, case, **changes))


@pytest.mark.xdist_group("llama")
def test_keys_of_other_versions_without_effect_are_read(plain):
    changes = dict(use_something=None, use_another=False, third={}, target_parameters=[])
    changes |= dict(megatron_core="megatron.core", loftq_config={"loftq_bits": 4}, peft_version="9")
    jf.load(copied(plain, "neutral", **changes))


@pytest.mark.xdist_group("llama")
def test_an_adapter_of_another_model_is_refused_with_its_tensors(plain):
    named = r"q_proj\.lora_A\.weight: \[4, 42\] in the file, and this model \[4, 44\]"
    with pytest.raises(jf.ConfigError, match=named):
        jf.load(plain, base=directory("mistral"))
    named = r"self_attn\.q_proj, .*: the model has no such module"
    with pytest.raises(jf.ConfigError, match=named):
        jf.load(plain, base=directory("gpt2"))
    held = load_file(plain / "adapter_model.safetensors")
    cut = copied(plain, "cut")
    name = next(name for name in held if "lora_B" in name)
    save_file({n: t for n, t in held.items() if n != name}, cut / "adapter_model.safetensors")
    with pytest.raises(jf.ConfigError, match=r"lora_B\.weight: not in adapter_model\.safetensors"):
        jf.load(cut)
    for empty in (torch.zeros(0, 42), torch.tensor(1.0)):
        name = next(name for name in held if "lora_A" in name)
        save_file(held | {name: empty}, cut / "adapter_model.safetensors")
        with pytest.raises(jf.ConfigError, match=r"lora_A\.weight: .* which is of no rank"):
            jf.load(cut)


@pytest.mark.xdist_group("llama")
def test_the_base_is_found_or_asked_for(plain, monkeypatch):
    hub = copied(plain, "hub", base_model_name_or_path="someone/model-1")
    with pytest.raises(
        jf.ConfigError,
        match=r"'someone/model-1', is no directory here.*hf download ID --local-dir PATH\), and .*"
        r"jf\.load\('.*hub', base=PATH\), or as \"base_model_name_or_path\"",
    ):
        jf.load(hub)
    assert jf.load(hub, base=directory("llama")).base == directory("llama")
    nameless = copied(plain, "nameless", base_model_name_or_path=None)
    for place, options, message in (
        (nameless, {}, r"base model of .*, None, is no directory here"),
        (plain, dict(base="nowhere"), "'nowhere', is no directory here"),
        (plain, dict(base=hub), "is an adapter itself: merge that one first"),
        (plain, dict(step=3), "has no steps: leave out step=3"),
        (directory("llama"), dict(base=plain), "is no adapter: leave out base="),
    ):
        with pytest.raises(jf.ConfigError, match=message):
            jf.load(place, **options)
    home = folder("llama", "together")
    monkeypatch.chdir(home)
    beside = shutil.copytree(directory("llama"), home / "base", dirs_exist_ok=True)
    inside = shutil.copytree(plain, home / "adapter", dirs_exist_ok=True)
    state(inside, base_model_name_or_path="../base")
    assert jf.load(inside).base == inside / "../base"
    state(inside, base_model_name_or_path="base")
    monkeypatch.chdir(beside.parent)
    assert jf.load(inside).base == Path("base")


@pytest.mark.xdist_group("llama")
def test_what_is_wrong_with_the_params_is_said(plain):
    model, found = loaded("llama"), jf.load(plain)
    with pytest.raises(jf.ConfigError, match=r"an adapter already .* merge it with jf.merge first"):
        jf.read_adapter(plain, found.params, found.config)
    with pytest.raises(jf.ConfigError, match=r"no adapter: jf\.adapt makes"):
        jf.save_adapter(folder("llama", "none"), model.params, model.config)
    with pytest.raises(jf.ConfigError, match=r"config.json of a model: choose another directory"):
        jf.save_adapter(directory("llama"), found.params, found.config)
    with pytest.raises(jf.ConfigError, match=r"jf\.merge does it .*jf\.save_adapter"):
        jf.save_pretrained(folder("llama", "none"), found.params, found.config)
    with pytest.raises(jf.ConfigError, match="dtype='int8' is not one of"):
        jf.save_adapter(folder("llama", "none"), found.params, found.config, dtype="int8")
    tiny = copied(plain, "no tensors")
    (tiny / "adapter_model.safetensors").unlink()
    with pytest.raises(jf.ConfigError, match=r"has no weights: no adapter_model.safetensors"):
        jf.load(tiny)


@pytest.mark.xdist_group("llama")
def test_modules_that_peft_saves_whole_are_read(plain):
    """Here the norms and the output layer, as in long-context training."""
    model, place = saved("llama", "norms", **QV, modules_to_save=["norm", "lm_head", "layernorm"])
    found, batch = jf.load(place), inputs("llama")
    assert_close(ours(found, batch), theirs(model, batch), batch)
    assert set(found.learned) == {"blocks", "final_norm", "head"}
    with pytest.raises(jf.ConfigError, match=r"blocks\.attention\.[qv], which is no array"):
        jf.save_adapter(folder("llama", "none"), found.params, found.config, learned=found.learned)
    back = folder("llama", "two branches")
    learned = ("final_norm", "head")
    jf.save_adapter(back, found.params, found.config, learned=learned)
    kept = {n: t for n, t in tensors(place).items() if "_layernorm" not in n}
    assert_same_tensors(tensors(back), kept)
    assert settings_of(back)["modules_to_save"] == ["lm_head", "model.norm"]
    state(back, base_model_name_or_path=str(directory("llama")))
    assert jf.load(back).learned == learned


@pytest.mark.xdist_group("llama")
def test_an_adapter_goes_to_the_mesh_of_its_base_and_keeps_float32(plain):
    mesh = jf.make_mesh()
    leaf = leaves_of(jf.load(plain, mesh=mesh, dtype="bfloat16").params)["blocks.attention.q"]
    parts = (leaf.weight, leaf.a, leaf.b, leaf.scale)
    assert {part.sharding.mesh for part in parts} == {mesh}
    assert [str(part.dtype) for part in parts] == ["bfloat16", *["float32"] * 3]
    found = jf.load(plain)
    half = folder("llama", "half")
    jf.save_adapter(half, found.params, found.config, dtype="bfloat16")
    assert {tensor.dtype for tensor in tensors(half).values()} == {torch.bfloat16}
    large = jax.tree.map(lambda leaf: leaf * 1e8, found.params)
    with pytest.raises(jf.ConfigError, match="beyond the range of float16: save it as bfloat16"):
        jf.save_adapter(half, large, found.config, dtype="float16")


TIED = {
    "the table of a tied model": ("gpt2", ["wte"], r"wte: embed\.tokens is used in several"),
    "that table saved whole": ("gpt2", [], r"lm_head\.weight is transformer\.wte\.weight, and"),
    "its output layer": ("qwen2", ["lm_head"], "no such module of its own"),
    "one of two stacks": ("t5", ["encoder.embed_tokens"], "module of its own.*Adapt other"),
    "positions of BART": ("bart", ["embed_positions"], "by the tokens, and .* by their positions"),
}


@pytest.mark.parametrize("case", slow_but(TIED, "the table of a tied model", "its output layer"))
def test_an_embedding_that_peft_adapts_in_one_place_alone_is_refused(case):
    name, targets, message = TIED[case]
    if case == "positions of BART":
        settings = dict(peft_type="LORA", base_model_name_or_path=str(directory(name)))
        place = folder(name, "positions")
        held = {"A": torch.ones(2, 130), "B": torch.ones(42, 2)}
        module = "base_model.model.model.encoder.embed_positions.lora_embedding_"
        save_file({module + end: t for end, t in held.items()}, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(json.dumps(settings | {"r": 2}))
    elif not targets:
        place = saved(name, "whole", target_modules=["c_fc"], modules_to_save=["wte"])[1]
    else:
        place = saved(name, "tied", target_modules=targets)[1]
    with pytest.raises(jf.ConfigError, match=message):
        jf.load(place)


@pytest.mark.parametrize("name", slow_but(["gpt2", "t5", "bart"], "gpt2"))
def test_the_table_of_a_tied_model_is_not_written(name):
    model = loaded(name)
    lora = jf.LoRA(rank=2, targets=("embed.tokens",))
    params = jf.adapt(model.params, model.config, lora, jax.random.key(0))
    with pytest.raises(jf.ConfigError, match=r"embed\.tokens is used in several places.* Merge it"):
        jf.save_adapter(folder(name, "tied too"), params, model.config)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """(base, adapter) with a tokenizer, beside a text."""
    home = tmp_path_factory.mktemp("told")
    text = home / "text.txt"
    text.write_text("the cat sees a dog.\n" * 40)
    tokenizer = jf.tokenizer.byte_tokenizer()
    config = jf.ModelConfig(
        vocab_size=tokenizer.vocab_size, d_model=16, n_heads=2, n_layers=1, max_length=32
    )
    params = jf.init(config, jax.random.key(0))
    jf.save_pretrained(home / "base", params, config, tokenizer)
    params = noised(jf.adapt(params, config, jf.LoRA(rank=2), jax.random.key(1)))
    jf.save_adapter(home / "adapter", params, config, base=home / "base")
    return home


@pytest.mark.slow
def test_the_commands_take_an_adapter_for_a_model(told, capsys):
    adapter, merged = str(told / "adapter"), str(told / "merged")
    assert main(["convert", adapter, merged, "--merge", "--verify"]) == 0
    assert "both models agree" in capsys.readouterr().out
    said = []
    for path in (adapter, merged):
        wanted = ["--data.validation", str(told / "text.txt"), "--data.cache_dir", str(told / "c")]
        assert main(["evaluate", path, *wanted]) == 0
        wanted = ["--prompt", "the", "--seed", "0", "--max_new_tokens", "5"]
        assert main(["sample", path, *wanted]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert main(["convert", adapter, str(told / "again")]) == 0
    assert f"an adapter of peft over {told / 'base'}" in capsys.readouterr().out
    assert_same_tensors(tensors(told / "again"), tensors(told / "adapter"))
    assert (told / "again/tokenizer.json").is_file()
    assert main(["convert", str(told / "base"), str(told / "run")]) == 0
    capsys.readouterr()
    over = [jf.load(adapter, base=told / name).params for name in ("base", "run")]
    jax.tree.map(np.testing.assert_array_equal, *over)
    changes = [f"run.init_from={adapter}", "data.sequence_length=16"]
    started = jf.load_config(ROOT / "configs/finetune.py", changes)
    assert started.model.d_model == 16
    assert started.tokenizer.path == str(told / "base/tokenizer.json")


def test_convert_says_what_does_not_go_together(told, capsys):
    adapter, base, target = (str(told / name) for name in ("adapter", "base", "not written"))
    for arguments, message in {
        (base, target, "--merge"): "has no adapter to merge: leave out --merge",
        (adapter, target, "--verify"): "--verify compares whole models",
    }.items():
        assert main(["convert", *arguments]) == 2
        assert message in capsys.readouterr().err
        assert not (told / "not written").exists()
