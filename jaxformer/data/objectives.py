"""What is learnt of the data: each objective's model, the fields it reads, the tokens it needs, and its rows."""

from collections.abc import Callable
from typing import NamedTuple

from jaxformer.config import ConfigError, RunConfig
from jaxformer.data.best_fit import BestFitRows
from jaxformer.data.forms import Answers, Classes, Form, Pairs, Tags
from jaxformer.data.masking import MaskedRows
from jaxformer.data.phases import row_lengths
from jaxformer.data.rows import CausalRows, Rows
from jaxformer.data.sources.records import Field, Fields, Kind
from jaxformer.data.spans import PrefixRows, SpanRows
from jaxformer.data.store import TokenStore
from jaxformer.tokenizer import MARKS, SENTINELS, Tokenizer

# With fewer tokens than this a row has no room for special tokens and text.
SHORTEST_ROW = 8


def _causal(store: TokenStore, run: RunConfig, tokenizer: Tokenizer) -> Rows:
    if run.data.packing == "best_fit":
        return BestFitRows(store, run.data, tokenizer.end_token)
    return CausalRows(store, run.data)


class Objective(NamedTuple):
    """A row of the table: the models that can learn it, what it reads, the tokens it needs beside the end token (in models
    that are no decoder), and how its rows are made: by their form where it reads records, else cut from text.
    """

    families: tuple[str, ...]
    head: str
    fields: tuple[str, ...]
    specials: tuple[str, ...] = ()
    form: type[Form] | None = None
    rows: Callable[[TokenStore, RunConfig, Tokenizer], Rows] = _causal


# For a model's family and head, `auto` is the first that both can learn.
OBJECTIVES = {
    "causal": Objective(("decoder",), "language", ("text",)),
    "masked": Objective(("encoder",), "masked", ("text",), MARKS, rows=MaskedRows),
    "spans": Objective(("encoder_decoder",), "language", ("text",), SENTINELS, rows=SpanRows),
    "prefix": Objective(("encoder_decoder",), "language", ("text",), rows=PrefixRows),
    "pairs": Objective(("encoder_decoder",), "language", ("source", "target"), form=Pairs),
    "answers": Objective(("decoder",), "language", ("source", "target"), form=Answers),
    "classes": Objective(("encoder", "decoder"), "classes", ("text", "pair", "label"), MARKS, Classes),
    "tags": Objective(("encoder", "decoder"), "tags", ("words", "tags"), MARKS, Tags),
}

# The setting that names the field of each thing that is read, and of which kind it is.
FIELDS: dict[str, tuple[str, Kind]] = {
    "text": ("text_field", "text"),
    "pair": ("pair_field", "text"),
    "source": ("source_field", "text"),
    "target": ("target_field", "text"),
    "label": ("label_field", "label"),
    "words": ("text_field", "words"),
    "tags": ("label_field", "tags"),
}


def objective_of(run: RunConfig) -> str:
    """The objective of a run, `auto` resolved. Raises ConfigError for one that its model or its rows cannot learn."""
    family, head, asked = run.model.family, run.model.output, run.data.objective
    fitting = [known for known, row in OBJECTIVES.items() if family in row.families and head == row.head]
    name = fitting[0] if asked == "auto" and fitting else asked
    if not fitting:
        raise ConfigError(
            f"a model with model.head={head} learns nothing: set model.head to language, masked, classes or tags."
        )
    if name not in fitting:
        wanted = OBJECTIVES.get(name)
        needs = f" needs model.family {' or '.join(wanted.families)} and model.head={wanted.head}" if wanted else ""
        raise ConfigError(
            f"data.objective={name}{needs}, and the model has model.family={family} and model.head={head}: "
            f"change the model, or set data.objective to one that it can learn ({', '.join(fitting)})."
        )
    data = run.data
    if data.packing != "stream" and (name in ("spans", "prefix") or run.model.next_sentence):
        what = f"data.objective={name}" if not run.model.next_sentence else "model.next_sentence"
        raise ConfigError(
            f"data.packing={data.packing} cannot be had with {what}, whose rows are one text: set it to stream."
        )
    if len(row_lengths(data)) > 1 and name != "causal":
        raise ConfigError(
            f"data.length_warmup={data.length_warmup!r} cannot be had with data.objective={name}, whose rows lose their "
            "sense when they are cut: leave it empty."
        )
    if name != "causal" and min(data.sequence_length, data.source_length or SHORTEST_ROW) < SHORTEST_ROW:
        raise ConfigError(
            f"data.sequence_length={data.sequence_length}, data.source_length={data.source_length}: a row of "
            f"data.objective={name} takes at least {SHORTEST_ROW} tokens."
        )
    return name


def fields_of(run: RunConfig) -> Fields:
    """The fields that a run's objective reads of its records; one alone means that it reads text."""
    found = []
    for thing in OBJECTIVES[objective_of(run)].fields:
        setting, kind = FIELDS[thing]
        if thing != "pair" or run.data.pair_field:
            found.append(Field(f"data.{setting}", getattr(run.data, setting), kind))
    return tuple(found)


def specials_of(run: RunConfig) -> tuple[str, ...]:
    """The special tokens that a tokenizer made for a run has beside the end token."""
    return OBJECTIVES[objective_of(run)].specials if run.model.family != "decoder" else ()


def check_tokenizer(objective: str, tokenizer: Tokenizer, path: str) -> None:
    """Raises ConfigError where a tokenizer lacks tokens that an objective cannot do without."""
    missing = {
        "masked": [
            mark for mark, role in zip(MARKS, ("cls", "sep", "mask"), strict=True) if tokenizer.special(role) is None
        ],
        "spans": [] if tokenizer.sentinels() else ["<extra_id_0> and so on"],
    }.get(objective)
    if missing:
        named, remedy = "the tokenizer of the prepared text", "prepare the text with this config"
        if path:
            remedy = "add what is missing to its added_tokens, or leave tokenizer.path empty to have one made"
            named = f"tokenizer.path={path}"
        raise ConfigError(f"{named} has no {', '.join(missing)}, which data.objective={objective} needs: {remedy}.")
