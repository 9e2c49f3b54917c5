"""Run on eight forced host devices: the step of each mesh beside that of one device. Prints JSON
for test_sharding.py. With the argument "slow": the steps of the slow tests; with "axes": a mesh
with explicit axes beside one with automatic ones; with "muon": what optimizers exchange."""

import dataclasses
import json
import math
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import AxisType
from learning_steps import a_batch, a_run, step_of
from shapes import model

import jaxformer as jf
from jaxformer.arrays.mesh import batch_sharding, make_mesh, parameter_sharding
from jaxformer.arrays.params import init_params, map_specs, rows
from jaxformer.checkpoints.averages import evaluation_weights
from jaxformer.config.adapter import AdapterConfig
from jaxformer.config.settings import with_settings
from jaxformer.config.train import OptimizerConfig
from jaxformer.interop import pretrained
from jaxformer.losses import cross_entropy as losses
from jaxformer.losses.heads import head_loss
from jaxformer.models.transformer import specs as specs_of
from jaxformer.runs.resolve import run_specs
from jaxformer.training.optimizers.run_optimizer import make_optimizer, with_average
from jaxformer.training.optimizers.schedules import make_schedule
from jaxformer.training.state import abstract_state, init_state

MESHES = {
    "fsdp 8": dict(data=1, fsdp=8),
    "tensor 4": dict(data=2, tensor=4),
    "all three": dict(data=2, fsdp=2, tensor=2),
}
SEQUENCE_TO_SEQUENCE = {
    "family": "encoder_decoder",
    "positions": "t5",
    "n_encoder_layers": 1,
    "bias": "all",
}
BERT = {
    "family": "encoder",
    "embedding.token_types": 2,
    "head.next_sentence": True,
    "embedding.norm": True,
    "norm_placement": "post",
}
LATENT = {
    "mixer": "latent",
    "n_kv_heads": 0,
    "latent.kv_rank": 16,
    "latent.query_rank": 24,
    "latent.rope_head_dim": 4,
}
DELTA = {"layer_pattern": "dm", "n_layers": 2, "recurrent.key_heads": 2, "recurrent.chunk": 4}
MAMBA2 = DELTA | {"layer_pattern": "sm", "recurrent.key_heads": 1}
CLASSES = {"family": "encoder", "head.kind": "classes", "head.n_classes": 3}
DISENTANGLED = {"positions": "disentangled", "relative.buckets": 8, "relative.distance": 10}
SHARED = {"n_layers": 4, "layer_groups": 2, "layer_loop": "scan", "embedding.width": 16}
MUP = {"parametrization": "mup", "mup_base": "d_model=16 n_heads=2 n_kv_heads=1"}
CASES = {  # model of shapes.py, changes to it, microbatches, meshes
    "llama": ("llama", {"n_layers": 2}, 1, ["all three"]),
    "gpt2": ("gpt2", {"dropout": 0.1}, 2, ["all three"]),
}
# Further families, latents and blocked dropout are in context_devices.py, experts in
# expert_devices.py.
SLOW_CASES = {
    "llama": ("llama", {"n_layers": 2}, 1, ["fsdp 8", "tensor 4"]),
    "splash": ("llama", {"attention.kernel": "tpu"}, 1, ["tensor 4"]),
    # In muP, at twice the width of the base.
    "tiles": ("llama", MUP, 4, ["all three"]),
    "lora": ("llama", {}, 2, ["all three"]),
    "prefix": ("llama", {}, 2, ["all three"]),
    "prompt of a source": (
        "llama",
        SEQUENCE_TO_SEQUENCE | {"attention.max_segments": 1},
        1,
        ["all three"],
    ),
    "shared layers": ("llama", CLASSES | SHARED | {"positions": "alibi"}, 1, ["all three"]),
    "disentangled": ("llama", CLASSES | DISENTANGLED, 2, ["all three"]),
}
EXPLICIT = {"llama": CASES["llama"]}
SLOW_EXPLICIT = {
    "encoder-decoder": ("llama", SEQUENCE_TO_SEQUENCE, 1),
    "encoder": ("gpt2", BERT, 2),
    "latent": ("llama", LATENT, 2),
    "delta": ("llama", DELTA, 2),
    "mamba2": ("llama", MAMBA2, 2),
} | {
    name: SLOW_CASES[name]
    for name in ("lora", "prefix", "prompt of a source", "shared layers", "disentangled")
}
ADAPTERS = {
    "lora": AdapterConfig(kind="lora", rank=4, targets="attention, ffn, embed, head"),
    "prefix": AdapterConfig(kind="prefix", tokens=5),
    "prompt of a source": AdapterConfig(kind="prompt", tokens=5),
}
DRAWN = ("llama", "lora", "prompt of a source")  # whose first state each mesh draws by itself
STEPS = 3


def run_of(name, base, changes, pieces):
    changes = {"vocab_size": 64, "n_layers": 1} | changes
    run = a_run(base, 16, train={"microbatches": pieces}, **changes)
    return dataclasses.replace(run, adapter=ADAPTERS.get(name, AdapterConfig()))


def batch_of(config, seed=0):
    """A batch of the family: padded rows, a source beside them, types and a second target, as the
    model reads them."""
    batch, rng = a_batch(16, seed=seed), np.random.default_rng(seed)
    if config.family == "decoder":
        return batch
    batch["segment_ids"] = (np.arange(24) < rng.integers(12, 25, (16, 1))).astype(np.int32)
    if config.family == "encoder_decoder":
        batch["source"] = rng.integers(0, 64, (16, 20), dtype=np.int32)
        batch["source_segment_ids"] = (np.arange(20) < rng.integers(8, 21, (16, 1))).astype(
            np.int32
        )
    if config.embedding.token_types:
        batch["token_types"] = rng.integers(0, 2, (16, 24), dtype=np.int32)
        batch["next_sentence"] = rng.integers(0, 2, (16, 1), dtype=np.int32)
        batch["next_sentence_weights"] = np.ones((16, 1), np.float32)
    if config.output == "classes":
        batch["targets"], batch["weights"] = (
            rng.integers(0, 3, (16, 1), dtype=np.int32),
            np.ones((16, 1), np.float32),
        )
    return batch


def train(run, mesh, first=None):
    """Losses and gradient norms of some steps, the final params and their average on the host, what
    was seen of the placement, and the first state on the host. `first` is one to begin with; it is
    drawn if None, which takes as long to compile as half a step."""
    with jax.set_mesh(mesh):
        specs, schedule = (
            run_specs(run.data.objective, run.model, run.adapter),
            make_schedule(run.optimizer, run.train.steps),
        )
        optimizer = with_average(make_optimizer(run.optimizer, schedule, specs), 0.5)
        if first is None:
            state = init_state(specs, optimizer, mesh=mesh, seed=run.run.seed)
        else:
            places = jax.tree.map(
                lambda leaf: leaf.sharding, abstract_state(specs, optimizer, mesh)
            )
            state = jax.device_put(first, places)
        first = jax.tree.map(np.array, state)
        step = step_of(run, optimizer, schedule)
        seen = []
        for i in range(STEPS):
            state, metrics = step(
                state, jax.device_put(batch_of(run.model, i), batch_sharding(mesh))
            )
            seen.append([float(metrics.get("nats", metrics["loss"])), float(metrics["grad_norm"])])
        shards = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)}
        spread = max(
            leaf.size / leaf.addressable_shards[0].data.size
            for leaf in jax.tree.leaves(state.params)
        )
        average = evaluation_weights(state.params, state.optimizer)
        same_places = jax.tree.map(lambda a, b: a.sharding == b.sharding, average, state.params)
        return (
            np.array(seen),
            jax.tree.map(np.asarray, (state.params, average)),
            {
                "devices": max(shards),
                "spread": spread,
                "average placed as params": all(jax.tree.leaves(same_places)),
            },
            first,
        )


def steps(cases, meshes, drawn=()):
    """How far the steps of runs on meshes are from those of one device, and what was seen of their
    placement. A case is a run and its places: the name of a mesh and changes to the model there,
    which one device computes in any way."""
    one, report = make_mesh(devices=jax.devices()[:1]), {}
    dense = losses.DENSE_LOGITS
    for name, (run, places) in cases.items():
        losses.DENSE_LOGITS, losses.TILE_ROWS["cpu"] = (0, 8) if name == "tiles" else (dense, 512)
        expected, params, _, first = train(run, one)
        for label, changes in places:
            there = dataclasses.replace(run, model=with_settings(run.model, changes))
            mesh = make_mesh(**meshes[label])
            found, placed, seen, _ = train(there, mesh, None if name in drawn else first)
            apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), placed, params)
            report[", ".join([name, label, *changes.values()])] = seen | {
                "loss": float(np.abs(found / expected - 1).max()),
                "params": max(jax.tree.leaves(apart)),
            }
    losses.DENSE_LOGITS, losses.TILE_ROWS["cpu"] = dense, 512
    return report


def explicit_axes_trace(run):
    """The loss and its gradient under explicit axes: a placement that is nowhere said is an error
    there."""
    mesh = make_mesh(2, 2, 2, explicit=True)
    specs, batch = run_specs(run.data.objective, run.model, run.adapter), batch_of(run.model)

    def loss(params, batch):
        return head_loss(params, run.model, batch)["loss"][0]

    def placed(_, spec):
        place = parameter_sharding(mesh, spec.shape, spec.axes)
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=place)

    with jax.set_mesh(mesh):
        batch = jax.device_put(batch, batch_sharding(mesh))
        jax.jit(jax.value_and_grad(loss)).lower(map_specs(placed, specs), batch)


def on_a_mesh_of_ones_own(kind):
    """A run on a mesh of `jax.make_mesh` that is continued, written to a directory and read, with
    the texts that its params write: the arrays, and whether all were on that mesh."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(kind,) * 3)
    config = model("llama", n_layers=1)
    optimizer = optax.adamw(1e-2)

    def loss(params, batch, key):
        logits = jf.forward(params, config, batch["tokens"])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return {"loss": (nats.sum(), nats.size)}

    batches = [{name: a_batch(8, i)[name] for name in ("tokens", "targets")} for i in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        for steps in (2, 3):
            state = jf.init_state(jf.specs(config), optimizer, mesh=mesh)
            step = jf.make_step(loss, optimizer, microbatches=2)
            checkpoints = jf.Checkpoints(f"{folder}/run")
            state = jf.fit(step, state, batches, steps=steps, checkpoints=checkpoints)
        jf.save_pretrained(f"{folder}/model", state.params, config)
        params = jf.load(f"{folder}/model", mesh=mesh).params
    prompt = batches[0]["tokens"][:4, :6]
    texts = [jf.generate(params, config, prompt, 4, temperature=0)]
    with jax.set_mesh(mesh):
        texts.append(jf.generate(params, config, prompt, 4, temperature=0))
        texts += jf.beam_search(params, config, prompt, 4, beams=2)
        logits = jax.jit(jf.forward, static_argnums=1)(params, config, prompt)
    meshes = {leaf.sharding.mesh for leaf in jax.tree.leaves((state, params))}
    return jax.tree.map(np.asarray, (state, params, texts)), meshes == {mesh}, np.asarray(logits)


def exchanged_by(name):
    """The bytes of collectives by kind that a step of an optimizer alone has on the mesh, those of
    the matrices, and how far its updates are from those of one device."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from hlo import count

    table = specs_of(model("llama", n_layers=3))
    config = OptimizerConfig(name=name)
    optimizer = make_optimizer(config, make_schedule(config, 60), table)

    def draw(i):
        return init_params(table, jax.random.key(i))

    def updates(mesh):
        with jax.set_mesh(mesh):
            state = init_state(table, optimizer, mesh=mesh)
            places = jax.tree.map(lambda leaf: leaf.sharding, (state.params, state.optimizer))
            gradients = jax.device_put(draw(1), places[0])
            program = jax.jit(optimizer.update, out_shardings=places)
            program = program.lower(gradients, state.optimizer, state.params).compile()
            made, _ = program(gradients, state.optimizer, state.params)
        return program.as_text(), jax.tree.map(np.asarray, made)

    text, made = updates(make_mesh(1, 4, 2))
    _, expected = updates(make_mesh(devices=jax.devices()[:1]))
    found = {"apart": 0.0}
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        found["apart"] = max(found["apart"], float(np.abs(a - b).max() / np.abs(b).max()))
    for entry in count(text).collectives:
        found[entry.kind] = found.get(entry.kind, 0) + entry.count * entry.bytes
    matrices = [spec for spec in rows(table).values() if spec.is_matrix and spec.is_stacked]
    return found | {"matrices": sum(4 * math.prod(spec.shape) for spec in matrices)}


def explicit_beside_automatic_axes():
    """Whether what is made on a mesh with explicit axes is what is made on the same with automatic
    ones, to the last bit; and how far logits are apart, which `forward` places by types there."""
    (explicit, on_mesh, logits), (automatic, _, expected) = map(
        on_a_mesh_of_ones_own, (AxisType.Explicit, AxisType.Auto)
    )
    same = jax.tree.map(np.array_equal, explicit, automatic)
    apart = float(np.abs(logits - expected).max())
    return {"same": all(jax.tree.leaves(same)), "on the mesh": on_mesh, "apart": apart}


def loaded_on_a_mesh(config):
    """A model directory written from sharded params and read onto the mesh: whether all is equal,
    and where it should be."""
    mesh, table = make_mesh(2, 2, 2), specs_of(config)
    shardings = map_specs(lambda _, spec: parameter_sharding(mesh, spec.shape, spec.axes), table)
    params = init_params(table, jax.random.key(0))
    with tempfile.TemporaryDirectory() as folder:
        jf.save_pretrained(
            folder, jax.tree.map(jax.device_put, params, shardings), config, shard_bytes=20_000
        )
        found = jf.load(folder, mesh=mesh).params
        pretrained.HOST_BYTES = 500
        with jax.set_mesh(mesh):
            in_pieces = jf.load(folder, mesh=mesh).params
    same = jax.tree.map(
        lambda a, b, c, place: (
            np.array_equal(a, b) and np.array_equal(a, c) and a.sharding == b.sharding == place
        ),
        found,
        in_pieces,
        params,
        shardings,
    )
    split = max(
        leaf.size // leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(found)
    )
    return {"equal": all(jax.tree.leaves(same)), "split": split}


def exact_on_meshes(config):
    """The numbers of logits that differ from those of one device with model.exact, by mesh."""
    kinds = {"n_layers": 3, "layer_pattern": "mds"}
    kinds |= {"feed_forward": "experts", "experts.n": 4, "experts.pattern": "ed"}
    config, batch = with_settings(config, {"exact": True} | kinds), a_batch(16)
    params = init_params(specs_of(config), jax.random.key(0))
    forward = jax.jit(jf.forward, static_argnums=1)
    expected = np.asarray(forward(params, config, batch["tokens"]))
    differ = {}
    for label in ("data 8", "fsdp 8"):
        mesh = make_mesh(8) if label == "data 8" else make_mesh(1, 8)
        shardings = map_specs(
            lambda _, spec, mesh=mesh: parameter_sharding(mesh, spec.shape, spec.axes),
            specs_of(config),
        )
        with jax.set_mesh(mesh):
            tokens = jax.device_put(batch["tokens"], batch_sharding(mesh))
            found = forward(jax.tree.map(jax.device_put, params, shardings), config, tokens)
        differ[label] = int((np.asarray(found) != expected).sum())
    with jax.set_mesh(make_mesh(8, explicit=True)):
        try:
            forward(params, config, batch["tokens"])
        except jf.ConfigError as error:
            differ["explicit"] = str(error)
    return differ


def main() -> None:
    if sys.argv[1:] == ["axes"]:
        json.dump(explicit_beside_automatic_axes(), sys.stdout)
        return
    if sys.argv[1:] == ["muon"]:
        json.dump({name: exchanged_by(name) for name in ("adamw", "muon", "normuon")}, sys.stdout)
        return
    slow = sys.argv[1:] == ["slow"]
    cases, explicit = (SLOW_CASES, SLOW_EXPLICIT) if slow else (CASES, EXPLICIT)
    runs = {name: run_of(name, *case[:3]) for name, case in cases.items()}
    placed = {name: (run, [(label, {}) for label in cases[name][3]]) for name, run in runs.items()}
    report = {"steps": steps(placed, MESHES, DRAWN)}
    for name, case in explicit.items():
        explicit_axes_trace(run_of(name, *case[:3]))
    report["explicit"] = list(explicit)
    if not slow:
        report["pretrained"] = loaded_on_a_mesh(runs["llama"].model)
        report["exact"] = exact_on_meshes(runs["llama"].model)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
