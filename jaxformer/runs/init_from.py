"""The model of run.init_from: the parameters that a run takes from it, outside of the heads, which
may be new; and the reference of the objectives "dpo" and "ipo", which scores every batch before the
step reads it."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer.arrays.mesh import SHARED_ENTRY, batch_sharding, place_array, place_batch, placement
from jaxformer.arrays.params import Params, Spec, Specs, init_params, is_custom, map_specs, rows
from jaxformer.checkpoints.digests import fingerprint
from jaxformer.checkpoints.reading import flat_leaves
from jaxformer.config.adapter import AdapterConfig, Quantization
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import RunSettings, TokenizerConfig
from jaxformer.config.settings import RUN_SETTING, flat, names_marked, with_settings
from jaxformer.config.variants import SECOND_HEADS
from jaxformer.files import ConfigError, read_object, write_text
from jaxformer.losses.pairs import REFERENCE_ARRAYS, reference_log_probs
from jaxformer.models.transformer import OF_OBJECTIVE, check_model
from jaxformer.models.transformer import specs as model_specs
from jaxformer.models.upcycling import dense_of, is_upcycled, upcycle
from jaxformer.runs.directory import OtherData, RunDirectory
from jaxformer.runs.loading import added_ids, fingerprint_below, load_base
from jaxformer.runs.model_files import ModelFiles
from jaxformer.runs.objectives import objective_specs
from jaxformer.tokenizer import Tokenizer
from jaxformer.training.compiler_options import compiler_options
from jaxformer.training.state import TrainState, merged, on_mesh, split_frozen

# The branches of the params that may be new, or left behind.
HEAD_BRANCHES = ("head", "pooler", *SECOND_HEADS, OF_OBJECTIVE)


def check_base(model: ModelConfig, adapter: AdapterConfig, files: ModelFiles) -> None:
    """Raises ConfigError where a model, or an adapter over it, does not fit the model of
    run.init_from.

    A model setting that differs from the base takes effect if the parameters keep their shapes (a
    longer context, another window), and is refused by name otherwise. Experts are copies of a dense
    feed-forward (`models/upcycling.py`).
    """
    base = str(files)
    base_model = files.config
    model = dataclasses.replace(model, vocab_size=model.vocab_size or base_model.vocab_size)
    if not is_upcycled(model, base_model):
        _check_trunk(model, base_model, base)
        return
    _check_trunk(dense_of(model), base_model, base)
    if model.expert_width != model.ff_width:
        raise ConfigError(
            f"model.experts.d_ff={model.experts.d_ff} is not {model.ff_width}, the width of the"
            f" dense feed-forward of run.init_from={base!r}, of which each expert is a copy: set it"
            f" to {model.ff_width}, or to 0, which is the same."
        )
    if model.experts.shared_ff:
        raise ConfigError(
            f"model.experts.shared_ff={model.experts.shared_ff} adds a new shared expert to the"
            f" copies of the dense feed-forward of run.init_from={base!r}, so that the model would"
            " not begin from that one: set it to 0, or train without run.init_from."
        )
    if adapter.kind != "none":
        raise ConfigError(
            f"adapter.kind={adapter.kind!r} learns beside a model that stays as it is, and the"
            f" routers of the experts, which run.init_from={base!r} has not, have to learn: train"
            " the model with experts without an adapter first, and start from that run."
        )


def _check_trunk(model: ModelConfig, base_model: ModelConfig, base: str) -> None:
    """Raises ConfigError where a parameter outside of the heads has another shape than in the
    base."""
    trunk = trunk_of(model)
    base_trunk = trunk_of(base_model)
    if trunk == base_trunk:
        return
    lines = []
    base_settings = flat(base_model)
    run_settings = names_marked(ModelConfig, RUN_SETTING)
    for name, here in flat(model).items():
        there = base_settings[name]
        if name in run_settings or here == there:
            continue
        # Only what changes a shape by itself is named: another window or rate is no conflict.
        with contextlib.suppress(ConfigError):  # which refuses the setting alone
            if trunk_of(with_settings(base_model, {name: here})) == base_trunk:
                continue
        lines.append(f"model.{name}={here!r}, but it is {there!r} in the base")
    paths = [path for path in {**trunk, **base_trunk} if trunk.get(path) != base_trunk.get(path)]
    shape = trunk.get(paths[0], "missing")
    base_shape = base_trunk.get(paths[0], "missing")
    lines.append(f"so {paths[0]} is {shape} here, and {base_shape} in the base")
    reasons = "\n  ".join(lines)
    raise ConfigError(
        f"the parameters of run.init_from={base!r} do not fit this model:\n  {reasons}\n"
        "Remove these settings from the config and the command line, so that those of the base are"
        " used (configs/finetune.py sets none), or train without run.init_from."
    )


def settled_over(
    base: ModelFiles,
    settings: RunSettings,
    model: ModelConfig,
    adapter: AdapterConfig,
    tokenizer: TokenizerConfig,
) -> tuple[ModelConfig, TokenizerConfig, range, tuple[str, ...]]:
    """Return the model and the tokenizer of a run over the model of run.init_from before its data
    is read, the ids of the tokens that it adds, and the labels that its classes begin with. The
    tokenizer and the labels are those of the base, and of a run that was begun its own."""
    origin = base.or_begun(settings)
    # A run that was begun is compared with its own config.json instead.
    if origin is base:
        check_base(model, adapter, base)
    model, tokenizer, added = with_vocabulary_of(base, origin, model, tokenizer)
    labels = tuple[str, ...]()
    if model.output in ("classes", "tags") and origin.config.output == model.output:
        labels = origin.labels
    return model, tokenizer, added, labels


def with_vocabulary_of(
    base: ModelFiles, origin: ModelFiles, model: ModelConfig, settings: TokenizerConfig
) -> tuple[ModelConfig, TokenizerConfig, range]:
    """Return the model over `base` with room for the tokens that the run adds to its vocabulary;
    the tokenizer: that of `origin`, which is the base, or the run itself where it was begun; and
    the ids of these tokens."""
    settings = origin.with_tokenizer(settings)
    if not settings.added:
        return model, settings, range(0)
    tokenizer = Tokenizer.load(settings.path)
    present = []
    for name in settings.added:
        index = tokenizer.id_of(name)
        if index is not None and origin is base:
            present.append(f"{name} ({index})")
    if present:
        raise ConfigError(
            f"tokenizer.add_tokens={settings.add_tokens!r}: the tokenizer of"
            f" run.init_from={str(base)!r} has {', '.join(present)} already: leave out what"
            " it has, which can be used as it is."
        )
    size = tokenizer.with_special_tokens(settings.added).vocab_size
    before = model.vocab_size or base.config.vocab_size
    model = dataclasses.replace(model, vocab_size=max(before, size))
    return model, settings, added_ids(settings.added, tokenizer)


def trunk_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter outside of the heads, by its path."""
    # The number of classes is 0 until the data is read.
    complete = with_settings(model, {"head.n_classes": model.head.n_classes or 2})
    branches = model_specs(complete).items()
    table = rows({name: branch for name, branch in branches if name not in HEAD_BRANCHES})
    return {path: spec.shape for path, spec in table.items()}


class WarmStart(NamedTuple):
    """What a run takes from the model of run.init_from: parameters on their mesh, the paths of
    those among them that this model has not, and a sentence about both."""

    params: Params
    new: list[str]
    sentence: str

    @property
    def learned(self) -> tuple[str, ...]:
        """The branches (a new head) that learn with an adapter over the others."""
        return tuple(dict.fromkeys(path.partition(".")[0] for path in self.new))

    def record(self, files: ModelFiles, directory: RunDirectory) -> dict[str, Any]:
        """What data.json says of the model below an adapter, read from `files`. Raises ConfigError
        where the run in this directory was begun over another one."""
        base_fingerprint = fingerprint_below(self.params, self.learned)
        before = directory.record().get("base")
        if before not in (None, base_fingerprint):
            raise ConfigError(
                f"run.init_from={str(files)!r} is not the model that the adapter in"
                f" {directory} was begun with: its fingerprint is {base_fingerprint}, and data.json"
                f" has {before}. Restore that model there, or choose another run.dir."
            )
        base_path = str(files.path.absolute())
        return {"base": base_fingerprint, "base_path": base_path, "learned": [*self.learned]}

    def adapted(self, specs: Specs, target: TrainState, seed: int) -> Params:
        """The params of the model with its adapter before the first step, placed as those of the
        state `target`. Those of the base that learn are copied, because a step donates its
        state."""
        # Imported here, because runs without an adapter do not need it.
        from jaxformer.models.adapt import filled

        params = jax.tree.map(
            lambda leaf, target_leaf: place_array(leaf, target_leaf.sharding),
            filled(specs, self.params, jax.random.key(seed)),
            target.params,
        )
        learned, still = split_frozen(params, target.frozen)
        return merged(jax.tree.map(jnp.copy, learned), still, target.frozen)


def warm_start(
    files: ModelFiles,
    model: ModelConfig,
    *,
    objective: str = "auto",
    seed: int = 0,
    mesh: Mesh | None = None,
    quantize: Quantization | None = None,
    labels: tuple[str, ...] = (),
    added: range = range(0),
) -> WarmStart:
    """Return the parameters of the model of run.init_from that fit `model`, and new ones, drawn
    from a seed, for heads that differ and for what the objective brings.

    An adapter there is merged first, which a prompt or a prefix cannot be. A head of classes is
    used only for the same `labels`. Experts are copies of a dense feed-forward there. The `added`
    tokens have new rows.
    """
    base = load_base(files, mesh, quantize, added, model.vocab_size)
    table = model_specs(model) | objective_specs(objective, model)
    params = base.params
    specs = rows(table)
    routers = list[str]()
    is_dense = is_upcycled(model, base.config)
    if is_dense and trunk_of(dense_of(model)) == trunk_of(base.config):
        params = upcycle(params, model, lambda spec: placement(mesh, spec.shape, spec.axes))
        routers = [path for path in specs if ".experts.router" in path]
    # A quantized leaf is one.
    base_leaves = flat_leaves(params, is_leaf=is_custom)
    before = base.labels
    same_head = base.config.output == model.output and labels[: len(before)] == before
    new = list[str]()
    for path, spec in specs.items():
        in_head = path.partition(".")[0] == "head"
        fits = path in base_leaves and base_leaves[path].shape == spec.shape
        if not fits or (in_head and not same_head):
            new.append(path)
    # A parameter on one side alone, or of another shape, is allowed in a head only; the routers of
    # experts are new too.
    misfits = []
    for path in {**specs, **base_leaves}:
        is_matched = path in specs and path not in new
        if not is_matched and path.partition(".")[0] not in HEAD_BRANCHES and path not in routers:
            misfits.append(path)
    if misfits:
        raise ConfigError(
            f"run.init_from={str(files)!r} does not fit this model outside of its head:"
            f" {', '.join(misfits)}."
        )
    drawn_specs = {path: specs[path] for path in new}
    shardings = {path: placement(mesh, spec.shape, spec.axes) for path, spec in drawn_specs.items()}
    key = jax.random.key(seed)
    # One program, whose results are where they belong: the host never has them.
    drawn = jax.jit(lambda: init_params(drawn_specs, key), out_shardings=shardings)()

    def leaf(path: str, spec: Spec) -> Any:
        value = drawn.get(path, base_leaves.get(path))
        # A quantized leaf was placed when it was read.
        if is_custom(value):
            return value
        return place_array(value, placement(mesh, spec.shape, spec.axes))

    copied = len(specs) - len(new)
    sentence = f"{copied} tensors are those of {files}; new: {', '.join(new) or 'none'}."
    if routers:
        sentence += (
            f" Upcycled: the {model.experts.n} experts of a layer are copies of its dense"
            " feed-forward."
        )
    if added:
        sentence += (
            f" Rows {added.start} to {added.stop - 1} are those of added tokens: the mean of"
            " others."
        )
    return WarmStart(map_specs(leaf, table), new, sentence)


class Reference:
    """Scores batches with the params of run.init_from, which are read when they are first needed
    and stored once on the devices, placed as those of the run. They are in no checkpoint.

    Args:
      start: the model of the setting that `setting` names.
      config: the model of the run.
      record: the file in the run directory with the fingerprint of these params, which is compared
        where it is there.
      mesh: the devices; None: this machine's first one.
    """

    setting = "run.init_from"

    def __init__(
        self, start: ModelFiles, config: ModelConfig, record: Path, mesh: Mesh | None = None
    ) -> None:
        self._start = start
        self._config = config
        self._mesh = mesh
        self._record = record
        self._loaded: tuple[Params, str] | None = None

        def score(params: Params, batch: Any) -> dict[str, jax.Array]:
            return reference_log_probs(params, config, batch)

        shardings = None
        if mesh is not None:
            shardings = dict.fromkeys(REFERENCE_ARRAYS, batch_sharding(mesh))
        options = compiler_options(mesh)
        self._score = jax.jit(score, out_shardings=shardings, compiler_options=options)

    def load(self) -> tuple[Params, str]:
        """The params, which are read once, and their fingerprint. Raises ConfigError where they
        cannot be read, do not fit the model of the run, or are not those that it began with."""
        if self._loaded is not None:
            return self._loaded
        try:
            params = load_base(self._start, self._mesh).params
            check_model(params, self._config)
        except ConfigError as error:
            raise ConfigError(
                f"{self.setting}={str(self._start)!r}, with which the loss compares the model,"
                f" cannot be used: {error}"
            ) from error
        # All processes compute it together.
        now = fingerprint(flat_leaves(params))
        if self._record.is_file():
            before = read_object(self._record, "restore it").get("fingerprint")
            if before != now:
                raise OtherData(
                    f"{self.setting}={str(self._start)!r} is not the model that this run began"
                    f" with: its fingerprint is {now}, and {self._record} has {before}. Restore it"
                    " (further training of a run directory gives it a newer checkpoint), or choose"
                    " another run.dir."
                )
        self._loaded = params, now
        return self._loaded

    def keep(self) -> None:
        """Writes the fingerprint of the params into the run directory, where it has none yet."""
        _, now = self.load()
        if jax.process_index() == 0 and not self._record.is_file():
            text = json.dumps({"fingerprint": now}) + "\n"
            write_text(self._record, text, follow=False)

    def __call__(self, batch: Any) -> Any:
        """A batch of pairs on the devices, with the log-probabilities of its completions."""
        params = self.load()[0]
        placed = place_batch(batch, self._mesh)
        with on_mesh(self._mesh):
            return {**placed, **self._score(params, placed)}


class Teacher(Reference):
    """Adds the params of distill.teacher to each batch, for the step that computes its logits;
    `config` is the model of the teacher."""

    setting = "distill.teacher"

    def __call__(self, batch: Any) -> Any:
        """A batch on the devices, with these params as what its rows share."""
        return {**place_batch(batch, self._mesh), SHARED_ENTRY: self.load()[0]}
