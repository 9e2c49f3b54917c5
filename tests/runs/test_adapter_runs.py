"""A run that trains an adapter: only the adapter learns and is saved, over a base that is known."""

import json
import shutil

import jax
import numpy as np
import pytest
from tiny_run import PLAIN, assert_same_run, copy_until, line, logged, saved, train_here, write_text

import jaxformer as jf
from jaxformer.adapters.low_rank import LowRank
from jaxformer.arrays.params import is_custom, rows
from jaxformer.checkpoints.reading import read_manifest
from jaxformer.cli import main
from jaxformer.config.adapter import AdapterConfig
from jaxformer.config.run import RunConfig
from jaxformer.models.cost import flops_per_token
from jaxformer.runs.resolve import run_specs
from jaxformer.runs.setup import make_setup
from jaxformer.runs.states import first_state
from jaxformer.training.optimizers.groups import group_sizes

pytestmark = pytest.mark.slow

BASE = PLAIN | {"train.steps": 4, "train.eval_every": 0}
ADAPTER = PLAIN | {
    "adapter.kind": "lora",
    "adapter.rank": 2,
    "adapter.targets": "attention, ffn",
    "adapter.groups": "ffn: rank 3",
    "adapter.dropout": 0.1,
    "model.dropout": 0.0,
    "train.checkpoint_every": 4,
    "train.eval_every": 4,
    "train.steps": 8,
}
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(run directory, text) of a model to adapt."""
    folder = tmp_path_factory.mktemp("base")
    text = write_text(folder / "text.txt")
    assert train_here(line(folder / "base", text, BASE)) == 0
    return folder / "base", text


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """An adapter run over that base that nothing interrupts."""
    run_dir = tmp_path_factory.mktemp("runs") / "adapter"
    assert train_here(adapter_line(run_dir, base)) == 0
    return run_dir


def adapter_line(run_dir, base, **changes):
    return line(run_dir, base[1], ADAPTER | {"run.init_from": base[0]} | changes)


def test_a_checkpoint_holds_the_adapter_alone(base, run):
    paths = set(read_manifest(run / "checkpoints/8")["leaves"])
    params = {path for path in paths if path.startswith("params.")}
    matrices = ("attention.q", "attention.k", "attention.v", "attention.out", "ffn.up", "ffn.down")
    gated = {path for path in params if ".gate." in path}
    expected = {f"params.blocks.{m}.{part}" for m in matrices for part in ("a", "b", "scale")}
    assert params - gated == expected
    moments = {path for path in paths if path.startswith("optimizer.") and "embed.tokens" in path}
    assert moments == set()


def test_the_base_is_bitwise_what_it_was(base, run):
    found = jf.without_adapters(jf.load(run).params)
    wanted = jf.load(base[0]).params
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    adapted = jf.load(run).params["blocks"]["ffn"]["up"]
    assert isinstance(adapted, LowRank) and adapted.a.shape[-1] == 3
    assert np.any(np.asarray(adapted.b) != 0)


def test_the_first_params_are_those_of_adapt(base):
    """The run draws what jf.adapt draws with the key of its seed."""
    arguments = adapter_line(base[0].parent / "first", base)
    pairs = zip(arguments[1::2], arguments[2::2], strict=True)
    run = jf.load_config(arguments[0], [f"{name[2:]}={value}" for name, value in pairs])
    state = first_state(make_setup(run, lambda line: None), lambda line: None)
    loaded = jf.load(base[0])
    lora = jf.LoRA(rank=2, alpha=16, targets=("attention", "ffn"), ranks={"ffn": 3}, dropout=0.1)
    wanted = jf.adapt(loaded.params, loaded.config, lora, jax.random.key(run.run.seed))
    assert jax.tree.structure(state.params) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, state.params, wanted)


def test_another_base_is_refused_by_name(base, run, tmp_path):
    other, moved = tmp_path / "base", tmp_path / "moved"
    assert train_here(line(other, base[1], BASE | {"run.seed": 2})) == 0
    with pytest.raises(
        jf.ConfigError, match=r"not the model that the adapter in .* was trained on"
    ):
        jf.load(run, base=other)
    shutil.copytree(base[0], moved)
    same = jf.load(run, base=moved)
    jax.tree.map(np.testing.assert_array_equal, same.params, jf.load(run).params)
    with pytest.raises(jf.ConfigError, match=r"model below it is not at .*: put it there"):
        jf.load(run, base=tmp_path / "nothing")
    with pytest.raises(jf.ConfigError, match="has no adapter: leave out base="):
        jf.load(base[0], base=other)


def test_a_run_is_not_continued_over_another_base(base, tmp_path, capsys):
    mine = tmp_path / "mine"
    shutil.copytree(base[0], mine)
    own = (mine, base[1])
    assert train_here(adapter_line(tmp_path / "run", own, **{"train.steps": 4})) == 0
    shutil.rmtree(mine)
    assert train_here(line(mine, base[1], BASE | {"run.seed": 2})) == 0
    capsys.readouterr()
    assert train_here(adapter_line(tmp_path / "run", own)) == 2
    assert "is not the model that the adapter in" in capsys.readouterr().err
    assert saved(tmp_path / "run") == [4]


def test_sample_and_evaluate_find_the_base(run, capsys):
    assert main(["sample", str(run), "--prompt", "the cat", "--max_new_tokens", "4"]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(run)]) == 0
    last = [entry for entry in logged(run) if "val_loss" in entry][-1]["val_loss"]
    assert f"{last:.4f}" in capsys.readouterr().out


def test_a_run_over_an_adapter_run_merges_it(base, run, tmp_path):
    for name, changes in {"adapter": {}, "whole": {"adapter.kind": "none"}}.items():
        asked = ADAPTER | {"train.steps": 1, "run.init_from": run} | changes
        if changes:
            asked = {key: value for key, value in asked.items() if "adapter" not in key}
        assert train_here(line(tmp_path / name, base[1], asked)) == 0
    merged = jf.merge(jf.load(run).params)
    below = jf.without_adapters(jf.load(tmp_path / "adapter").params)
    jax.tree.map(np.testing.assert_array_equal, below, merged)
    whole = jf.load(tmp_path / "whole").params
    assert not any(map(is_custom, jax.tree.leaves(whole, is_leaf=is_custom)))
    assert jax.tree.structure(whole) == jax.tree.structure(merged)


def test_a_new_head_learns_with_the_adapter_and_is_saved(base, tmp_path):
    records = tmp_path / "classes.jsonl"
    rows = [{"text": f"the {word}", "label": word} for word in ("cat", "dog")] * 40
    records.write_text("\n".join(map(json.dumps, rows)))
    changes = {"model.head.kind": "classes", "train.steps": 4, "data.packing": "stream"}
    run_dir = tmp_path / "classes"
    assert train_here(adapter_line(run_dir, (base[0], records), **changes)) == 0
    loaded = jf.load(run_dir)
    assert loaded.config.head.n_classes == 2 and loaded.labels == ("cat", "dog")
    again = jf.load(run_dir, 4).params["head"]
    jax.tree.map(np.testing.assert_array_equal, loaded.params["head"], again)
    below = jf.without_adapters(loaded.params)
    wanted = jf.load(base[0]).params
    np.testing.assert_array_equal(below["embed"]["tokens"], wanted["embed"]["tokens"])
    assert np.any(np.asarray(loaded.params["head"]["bias"]) != 0)  # it begins at zero


@pytest.mark.parametrize("kind", ["int8", "nf4_double"])
def test_a_run_over_a_quantized_base_saves_the_adapter(base, kind, tmp_path, capsys):
    """On some of its matrices; merged, all are plain, and files are readable as others here are."""
    changes = {"adapter.base": kind, "train.steps": 2, "train.eval_every": 0}
    changes |= {"adapter.targets": "attention", "adapter.groups": ""}
    assert train_here(adapter_line(tmp_path / "run", base, **changes)) == 0
    loaded = jf.load(tmp_path / "run")
    # The base is quantized in its blocks alone.
    of_blocks = "int8_blocks" if kind == "int8" else kind
    base_params = jf.quantize(jf.load(base[0]).params, of_blocks)
    below, wanted = jf.without_adapters(loaded.params), base_params
    assert jax.tree.structure(below) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, below, wanted)
    tokens = np.arange(8)[None]
    found = jf.forward(loaded.params, loaded.config, tokens)
    merged = jf.forward(jf.merge(loaded.params), loaded.config, tokens)
    np.testing.assert_allclose(found, merged, atol=1e-5 * float(merged.std()))
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--merge"]) == 0
    assert "weights are those of the quantized base, which are rounded" in capsys.readouterr().out
    written = jf.load(tmp_path / "hf")
    again = jf.forward(written.params, written.config, tokens)
    np.testing.assert_allclose(again, merged, atol=1e-5 * float(merged.std()))
    (tmp_path / "plain").touch()
    mode = (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "hf" / "model.safetensors").stat().st_mode == mode


def test_a_run_over_quantized_experts_resumes_bitwise(base, tmp_path, capsys):
    """Their codes are of each expert, the router and its bias stay as they were, and the memory
    that is printed is that of the codes."""
    experts = {
        "model.feed_forward": "experts",
        "model.experts.n": 4,
        "model.experts.per_token": 2,
        "model.experts.d_ff": 24,
        "model.experts.router_bias": "balanced",
    }
    start = tmp_path / "base", base[1]
    assert train_here(line(*start, BASE | experts)) == 0
    capsys.readouterr()

    def run(name, steps):
        changes = {"adapter.base": "nf4", "train.steps": steps, "train.checkpoint_every": 2}
        changes |= {"adapter.targets": "experts, attention", "adapter.groups": "router: rank 1"}
        changes |= {"train.eval_every": 2}
        assert train_here(adapter_line(tmp_path / name, start, **changes)) == 0

    run("whole", 4)
    printed = capsys.readouterr().out
    run("parts", 2)
    run("parts", 4)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    loaded, below_run = jf.load(tmp_path / "whole"), jf.load(start[0])
    below, wanted = jf.without_adapters(loaded.params), jf.quantize(below_run.params, "nf4")
    jax.tree.map(np.testing.assert_array_equal, below, wanted)
    experts = loaded.params["blocks"]["experts"]
    assert np.any(np.asarray(experts["up"].b) != 0) and not is_custom(experts["router"].weight)
    assert np.any(np.asarray(experts["router_bias"]) != 0)
    mask = jf.adapter_mask(loaded.params)
    learning = jax.tree.map(lambda keep, leaf: leaf if keep else None, mask, loaded.params)
    learned = sum(leaf.size for leaf in jax.tree.leaves(learning))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params)) + 2 * 4 * learned
    assert f"{size / 1024:.1f} KiB of parameters and optimizer state" in printed


def test_an_adapter_of_the_codes_of_recurrent_layers_resumes_bitwise(base, tmp_path):
    """Of both mixers. `jaxformer verify` does the steps of a run without an adapter again."""
    start = tmp_path / "base", base[1]
    every = {"model.n_layers": 2, "train.microbatches": 1, "train.eval_every": 0}
    recurrent = every | {"model.layer_pattern": "ds", "train.steps": 1}
    assert train_here(line(*start, BASE | recurrent)) == 0
    every |= {"train.steps": 4, "train.checkpoint_every": 2}
    changes = {"adapter.base": "nf4", "adapter.targets": "delta, mamba2", "adapter.groups": ""}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train_here(adapter_line(whole, start, **every, **changes)) == 0
    copy_until(2, whole, parts)
    assert train_here(adapter_line(parts, start, **every, **changes)) == 0
    assert_same_run(parts, whole)
    loaded = jf.load(whole)
    below = jf.without_adapters(loaded.params)
    wanted = jf.quantize(jf.load(start[0]).params, "nf4")
    jax.tree.map(np.testing.assert_array_equal, below, wanted)
    for layer, mixer in (("0", "delta"), ("1", "mamba2")):
        leaves = loaded.params["blocks"][layer][mixer]
        learned = {name for name, leaf in leaves.items() if isinstance(leaf, LowRank)}
        codes = {name for name, leaf in below["blocks"][layer][mixer].items() if is_custom(leaf)}
        assert codes == {"q", "k", "v", "gate", "out"} <= learned
        assert all(np.any(np.asarray(leaves[name].b) != 0) for name in learned)


@pytest.mark.parametrize("kind", ["float32", "nf4"])
def test_a_run_of_dora_and_pissa_resumes_bitwise(base, kind, tmp_path):
    changes = {"adapter.dora": True, "adapter.init": "pissa", "adapter.base": kind}
    changes |= {"train.checkpoint_every": 2, "train.eval_every": 2}
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        run_line = adapter_line(tmp_path / name, base, **changes, **{"train.steps": steps})
        assert train_here(run_line) == 0
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    loaded = jf.load(tmp_path / "whole")
    leaf = loaded.params["blocks"]["attention"]["q"]
    assert np.any(leaf.a != leaf.start_a) and np.any(leaf.b != leaf.start_b)
    norms = jf.adapt(jf.without_adapters(loaded.params), loaded.config, jf.LoRA(dora=True), KEY)
    assert np.any(leaf.magnitude != norms["blocks"]["attention"]["q"].magnitude)
    tokens = np.arange(8)[None]
    found = jf.forward(loaded.params, loaded.config, tokens)
    merged = jf.forward(jf.merge(loaded.params), loaded.config, tokens)
    np.testing.assert_allclose(found, merged, atol=1e-5 * float(merged.std()))


def test_only_the_adapter_is_counted_as_learning(base):
    model = jf.load(base[0]).config
    run = RunConfig(model=model, adapter=AdapterConfig(kind="lora", targets="attention"))
    table = run_specs(run.data.objective, run.model, run.adapter)
    learned = sum(np.prod(spec.shape) for spec in rows(table).values() if spec.trainable)
    assert sum(map(sum, group_sizes(run.optimizer, table).values())) == learned
    whole = flops_per_token(model, 32)
    assert 0.66 * whole < flops_per_token(model, 32, table=table) < whole


def test_a_target_that_fits_nothing_stops_the_run_before_it_begins(base, tmp_path, capsys):
    changes = {"adapter.targets": "atention"}
    assert train_here(adapter_line(tmp_path / "run", base, **changes)) == 2
    said = capsys.readouterr().err
    assert "'atention' fits no matrix of this model. Did you mean attention" in said
    assert not (tmp_path / "run").exists()
