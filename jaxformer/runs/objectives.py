"""Objectives: the models that can learn each, what it reads, how its rows are made, and its
loss."""

import contextlib
import dataclasses
import functools
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax

from jaxformer.arrays.params import Params, Specs
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, ObjectiveName, PreferenceObjective, named_sources
from jaxformer.config.settings import Log, Table, choices
from jaxformer.config.train import LayerProducts
from jaxformer.data.masking import MaskedRows, missing_marks
from jaxformer.data.records import RecordField
from jaxformer.data.rows import RowFormat
from jaxformer.data.source import STDLIB, find_source
from jaxformer.data.spans import PrefixRows, SpanRows
from jaxformer.data.task import (
    MakeRows,
    Task,
    causal_rows,
    fields_of,
    missing_sentinels,
    nothing_missing,
    reads_plain_text,
)
from jaxformer.data.templates import (
    ClassTemplate,
    ContrastiveTemplate,
    MessagesTemplate,
    PairTemplate,
    PreferenceTemplate,
    PromptTemplate,
    SFTTemplate,
    TagTemplate,
    Template,
    UnpairedTemplate,
)
from jaxformer.files import ConfigError
from jaxformer.losses.heads import accuracy, head_loss
from jaxformer.models.transformer import OF_OBJECTIVE, specs
from jaxformer.tokenizer import MARKS, SENTINELS, Tokenizer
from jaxformer.training.step import Batch, Loss, Sums


class Objective(NamedTuple):
    """A row of the table of objectives; to add a row is to add an objective.

    The models that can learn it are those of its `families` and its `head`.

    fields: what is read of each record: names of `FIELD_SETTINGS`, whose settings name the field,
        or a `RecordField` itself, as `Field("", "rejected", "text")`. A text alone means that it
        reads text.
    specials: special tokens, beside the end token, of a tokenizer that is made for it (in models
        that are no decoder).
    template, rows: how rows are made, of records by the template, of text by `rows`. A template, a
        loss, `rows` and `missing` may be texts, "package.module:name", and are then imported where
        they are used.
    of_messages: the template of conversations, which are read in place of `fields` where
        data.messages_field is set; None where they cannot be.
    missing: names of the special tokens that a tokenizer lacks and the rows cannot do without.
    shortest: the fewest tokens of a row that has room for special tokens and text.
    takes_packing: rows may hold several texts, so data.packing may be other than "stream".
    every_token: each token of the text is predicted once, so that bits per byte mean something.
    loss: (params, config, batch, key, **options) -> Sums, what is minimized; "nats" among them is
        what is logged as the loss where that is another.
    specs: config -> the table of parameters that the loss has beside those of the model, which it
        reads as params["objective"][the name of the row]. They are initialized, placed, trained,
        counted and saved as the others.
    metrics: (params, config, batch) -> Sums, what an evaluation gives beside the loss.
    sequences: of a row, whose arrays are then [sequences, T], as the two completions of a pair.
    reference: whether the loss compares the model with the one that it starts from.
    writes: whether rows are prompts, to which the model writes the answers that it learns from.
    rowwise: whether the sums of the loss are over rows that do not read each other. Where they do,
        as by default, train.microbatches=auto is 1.
    dropout: whether training applies the dropout of the model and its adapter.
    """

    families: tuple[str, ...]
    head: str
    fields: tuple[str | RecordField, ...]
    specials: tuple[str, ...] = ()
    template: type[Template] | str | None = None
    of_messages: type[Template] | str | None = None
    rows: MakeRows | str = causal_rows
    missing: Callable[[Tokenizer], list[str]] | str = nothing_missing
    shortest: int = 8
    takes_packing: bool = True
    every_token: bool = False
    loss: Callable[..., Sums] | str = head_loss
    specs: Callable[[ModelConfig], Specs] | None = None
    metrics: Callable[[Params, ModelConfig, Batch], Sums] | None = None
    sequences: int = 1
    reference: bool = False
    writes: bool = False
    rowwise: bool = False
    dropout: bool = True


# For a model's family and head, `auto` is the first that both can learn.
OBJECTIVES: Table[Objective] = Table(
    ObjectiveName,
    {
        "causal": Objective(
            ("decoder",), "language", ("text",), shortest=1, every_token=True, rowwise=True
        ),
        "mlm": Objective(
            ("encoder",),
            "masked",
            ("text",),
            MARKS,
            rows=MaskedRows,
            missing=missing_marks,
            metrics=accuracy,
            rowwise=True,
        ),
        "span_corruption": Objective(
            ("encoder_decoder",),
            "language",
            ("text",),
            SENTINELS,
            rows=SpanRows,
            missing=missing_sentinels,
            takes_packing=False,
            rowwise=True,
        ),
        "prefix": Objective(
            ("encoder_decoder",),
            "language",
            ("text",),
            rows=PrefixRows,
            takes_packing=False,
            rowwise=True,
        ),
        "seq2seq": Objective(
            ("encoder_decoder",),
            "language",
            ("source", "target"),
            template=PairTemplate,
            rowwise=True,
        ),
        "sft": Objective(
            ("decoder",),
            "language",
            ("source", "target"),
            template=SFTTemplate,
            of_messages=MessagesTemplate,
            rowwise=True,
        ),
        "classes": Objective(
            ("encoder", "decoder"),
            "classes",
            ("text", "pair", "label"),
            MARKS,
            ClassTemplate,
            metrics=accuracy,
            rowwise=True,
        ),
        "token_classification": Objective(
            ("encoder", "decoder"),
            "tags",
            ("words", "tags"),
            MARKS,
            TagTemplate,
            metrics=accuracy,
            rowwise=True,
        ),
        "contrastive": Objective(
            ("encoder", "decoder"),
            "none",
            ("source", "target", "negatives"),
            MARKS,
            ContrastiveTemplate,
            loss="jaxformer.losses.pairs:contrastive_loss",
            sequences=2,
        ),
        **{
            # Of pairs: a prompt, the completion that is preferred, and the one that is not.
            name: Objective(
                ("decoder",),
                "language",
                (
                    RecordField("", "prompt", "prompt"),
                    RecordField("", "chosen", "completion"),
                    RecordField("", "rejected", "completion"),
                ),
                template=PreferenceTemplate,
                loss=f"jaxformer.losses.pairs:{name}_loss",
                rowwise=True,
                sequences=2,
                reference=name in ("dpo", "ipo"),
                # As in TRL: with dropout the model would differ from its reference before the
                # first step.
                dropout=False,
            )
            for name in ("dpo", "ipo", "orpo", "simpo")
        },
        # A completion and whether it is desirable; the mean over the batch is in the loss of each.
        "kto": Objective(
            ("decoder",),
            "language",
            (
                RecordField("", "prompt", "prompt"),
                RecordField("", "completion", "completion"),
                "label",
            ),
            template=UnpairedTemplate,
            loss="jaxformer.losses.pairs:kto_loss",
            sequences=2,
            reference=True,
            dropout=False,
        ),
        "grpo": Objective(
            ("decoder",),
            "language",
            (RecordField("", "prompt", "completion"), "expected"),
            template=PromptTemplate,
            takes_packing=False,
            loss="jaxformer.losses.policy:grpo_loss",
            writes=True,
            rowwise=True,
            dropout=False,
        ),
    },
    besides=("auto",),
)


# The fields of conversations, of which `auto` takes the first that a record has: of OpenAI's form,
# ShareGPT's, TRL's and Alpaca's.
CHAT_FIELDS = ("messages", "conversations", "prompt+completion", "instruction+input+output")


def objective_of(model: ModelConfig, data: DataConfig) -> str:
    """The objective of a run, `auto` resolved."""
    family = model.family
    head = model.output
    fitting = _fitting(model)
    if not fitting:
        *heads, last = dict.fromkeys(row.head for row in OBJECTIVES.values())
        raise ConfigError(
            f"a model with model.head.kind={head} learns nothing: set model.head.kind to"
            f" {', '.join(heads)} or {last}."
        )
    name: str = data.objective
    if name == "auto":
        name = fitting[0]
    if name not in fitting:
        objective = OBJECTIVES.get(name)
        needs = ""
        if objective:
            families = " or ".join(objective.families)
            needs = f" needs model.family {families} and model.head.kind={objective.head}"
        raise ConfigError(
            f"data.objective={name}{needs}, and the model has model.family={family} and"
            f" model.head.kind={head}: change the model, or set data.objective to one that it can"
            f" learn ({', '.join(fitting)})."
        )
    row = OBJECTIVES[name]
    if data.messages_field and not row.of_messages:
        able = ", ".join(key for key, entry in OBJECTIVES.items() if entry.of_messages)
        raise ConfigError(
            f"data.messages_field={data.messages_field!r} names conversations, which"
            f" data.objective={name} does not read: set data.objective={able}, or leave it empty."
        )
    if data.cut != "prompt" and name != "sft":
        raise ConfigError(
            f"data.cut={data.cut} says how examples of data.objective=sft are cut, and here is"
            f" data.objective={name}: leave it out."
        )
    if data.negatives_field and "negatives" not in row.fields:
        raise ConfigError(
            f"data.negatives_field={data.negatives_field!r} names texts that data.objective={name}"
            " does not read: set data.objective=contrastive, or leave it empty."
        )
    is_text = reads_plain_text(row.template, row.rows)
    is_written = name in ("sft", *get_args(PreferenceObjective))
    if {"never": is_written, "always": not is_text}.get(data.bos, False):
        raise ConfigError(
            f"data.bos={data.bos} says how documents of data.objective=causal begin, and here is"
            f" data.objective={name}, whose rows begin as the tokenizer's template says or in a way"
            " of their own: set it to auto."
        )
    if data.packing != "stream" and (model.second_heads or not row.takes_packing):
        setting = f"data.objective={name}"
        if model.second_heads:
            setting = f"model.{model.second_heads[0]}"
        raise ConfigError(
            f"data.packing={data.packing} cannot be had with {setting}, whose rows are one text:"
            " set it to stream."
        )
    if data.order != "epochs" and (not is_text or data.packing != "stream"):
        raise ConfigError(
            f"data.order={data.order} reads one stream of text, for data.objective=causal with"
            f" data.packing=stream, and here are data.objective={name} and"
            f" data.packing={data.packing}: set data.order=epochs, or change these two."
        )
    if min(data.sequence_length, data.source_length or data.sequence_length) < row.shortest:
        raise ConfigError(
            f"data.sequence_length={data.sequence_length}, data.source_length={data.source_length}:"
            f" a row of data.objective={name} takes at least {row.shortest} tokens."
        )
    return name


def with_chats(
    model: ModelConfig, data: DataConfig, setting: str = "train", log: Log = lambda line: None
) -> DataConfig:
    """Return the settings that read conversations, or prompts and completions, where data.objective
    is auto and the first record of `data.train` or `data.validation` is one; else `data` itself."""
    spec = next(iter(named_sources(getattr(data, setting))), STDLIB)
    if data.objective != "auto" or "sft" not in _fitting(model) or spec == STDLIB:
        return data
    row: object = None
    # What cannot be read is refused where it is read.
    with contextlib.suppress(ConfigError):
        row = find_source(spec, f"data.{setting}", (), data.malformed).first_row()
    # A text beside messages is learned, and pairs of answers need an objective of their own.
    if not isinstance(row, dict) or data.text_field in row or "rejected" in row:
        return data
    for name in CHAT_FIELDS:
        columns = name.split("+")
        if columns[0] in row and columns[-1] in row:
            break
    else:
        return data
    settings = {"messages_field": name}
    if isinstance(row.get("prompt"), str) and "completion" in row:
        settings = {"source_field": "prompt", "target_field": "completion"}
    shown = ", ".join(f"data.{key}={value}" for key, value in settings.items())
    log(f"data.{setting}={spec}: records are read as data.objective=sft, {shown}")
    return dataclasses.replace(data, objective="sft", **settings)  # type: ignore[arg-type]


def _fitting(model: ModelConfig) -> list[str]:
    """The objectives that a model can learn."""
    names = []
    for name, row in OBJECTIVES.items():
        if model.family in row.families and model.output == row.head:
            names.append(name)
    return names


def objective_specs(name: str, config: ModelConfig) -> Specs:
    """The table of the parameters that an objective brings, {"objective": {name: ...}}; empty for
    one without any. `jf.specs(config) | objective_specs(name, config)` is the table that a run
    trains. "auto" is the objective that a run of the model has by default."""
    if name == "auto":
        name = next(iter(_fitting(config)), name)
    row = OBJECTIVES.get(name)
    if row is None or row.specs is None:
        return {}
    return {OF_OBJECTIVE: {name: row.specs(config)}}


def row_format(model: ModelConfig, data: DataConfig) -> RowFormat:
    """How rows are laid out for a model."""
    return RowFormat(
        data.sequence_length,
        data.source_length or data.sequence_length,
        marks=model.family == "encoder",
        token_types=model.embedding.token_types,
        pair_target=next(iter(model.second_heads), ""),
        cut=data.cut,
        negatives=data.n_negatives,
    )


def task_of(model: ModelConfig, data: DataConfig) -> Task:
    """What the data package needs to know of a run's objective. Raises as `objective_of` does."""
    name = objective_of(model, data)
    row = OBJECTIVES[name]
    fields = row.fields
    template = row.template
    if data.messages_field:
        fields = ("messages",)
        template = row.of_messages
    specials = row.specials
    if model.family == "decoder":
        specials = ()
    return Task(
        name,
        row_format(model, data),
        fields_of(fields, data),
        specials,
        _imported(template),
        _imported(row.rows),
        _imported(row.missing),
        row.every_token,
    )


def loss_of(objective: str, config: ModelConfig, products: str = "dtype", **options: Any) -> Loss:
    """The loss that `train.py` uses for an objective of `data.objective`: (params, batch, key) ->
    Sums.

    `products` is that of train.products: "fp8" multiplies by the matrices of the layers in 8 bits.
    `options` are those of the objective's loss: label_smoothing and z_loss for the cross-entropies,
    where 0 leaves one out, and their logits_dtype ("float32" or "bfloat16"); temperature of
    "contrastive"; beta, and margin of "simpo", for preferences (`losses/pairs.py`), whose
    loss applies no dropout. Called outside of a transform of JAX, the loss warns where rows look
    padded without segment_ids.
    Raises ConfigError for an objective that there is not, and for an option that its loss does not
    have; the loss raises it for params without the parameters that the objective brings
    (`objective_specs`).
    """
    if objective not in OBJECTIVES:
        raise ConfigError(
            f"objective {objective!r} is not one of {', '.join(map(repr, OBJECTIVES))}."
        )
    row = OBJECTIVES[objective]
    if products not in choices(LayerProducts):
        raise ConfigError(
            f"products={products!r} is not one of {', '.join(choices(LayerProducts))}."
        )
    if products == "fp8" and (row.reference or row.writes):
        raise ConfigError(
            f"train.products=fp8: the objective {objective!r} compares the model with probabilities"
            " that are computed with products in model.dtype: set it to dtype."
        )
    loss = _imported(row.loss)
    option_names = set(inspect.signature(loss).parameters)
    unknown = [name for name in options if name not in option_names]
    if unknown:
        raise ConfigError(
            f"the loss of the objective {objective!r} takes no {', '.join(unknown)}: leave it out,"
            " and the setting of train that gives it at its default."
        )

    @functools.wraps(loss)
    def bound(params: Params, batch: Batch, key: jax.Array | None) -> Sums:
        if row.specs is not None and objective not in params.get(OF_OBJECTIVE, {}):
            raise ConfigError(
                f"the loss of the objective {objective!r} has parameters of its own, and these"
                f" params have none: make them of the table jf.specs(config) |"
                f" objective_specs({objective!r}, config) of jaxformer.runs.objectives."
            )
        if not row.dropout:
            key = None
        # Within a transform there are no values to look at.
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(batch)):
            from jaxformer.models.inputs import warn_of_padded_batch

            warn_of_padded_batch(batch, config.family)
        if key is not None:
            from jaxformer.adapters.low_rank import keyed

            params = keyed(params, key)
        if products == "fp8":
            from jaxformer.adapters.float8 import in_8_bits

            params = in_8_bits(params, specs(config))
        return loss(params, config, batch, key, **options)

    return bound


def _imported(entry: Any) -> Any:
    """The object that an entry of a row names as "package.module:name", or the entry itself."""
    if isinstance(entry, str):
        return pkgutil.resolve_name(entry)
    return entry
