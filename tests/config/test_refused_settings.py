"""Settings that are refused: the setting, its value, and the words of the message, which names what
is allowed and what to do. Each is told before anything else is done."""

from pathlib import Path

import pytest

import jaxformer as jf
from jaxformer.config import OptimizerConfig

pytestmark = pytest.mark.fast

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.py"
# Overrides of the quickstart, separated by blanks, and parts of the message.
REFUSED = [
    # What is no setting.
    ("model.n_layer=3", "no setting model.n_layer.", "mean model.n_layers?"),
    ("train.learning_rate=3", "train.learning_rate", "mean optimizer.learning_rate?"),
    ("optimizer.lr=3", "optimizer.lr", "optimizer.name", "optimizer.learning_rate"),
    ("model.n_layers", "model.n_layers", "section.field=value"),
    # What is no value of its type, or not within its bounds.
    ("model.norm=batch", "model.norm", "batch", "'rms', 'rms1p', 'layer', 'none'"),
    ("optimizer.schedule=cosin", "optimizer.schedule", "cosin", "'cosine'"),
    ("train.steps=many", "train.steps", "many", "INT"),
    ("train.steps=1.5", "train.steps", "1.5"),
    ("train.steps=0", "train.steps=0 must be at least 1"),
    ("train.microbatches=none", "no type matching INT|{auto} could be instantiated from ['none']"),
    ("train.microbatches=0", "train.microbatches=0 must be at least 1"),
    ("model.attention.dropout=none", "no type matching FLOAT|{auto} could be"),
    ("model.attention.dropout=1.0", "attention.dropout=1.0 must be at least 0 and below 1"),
    ("model.attention.dropout=nan", "attention.dropout=nan must be at least 0 and below 1"),
    ("model.dropout=1", "model.dropout=1.0 must be at least 0 and below 1"),
    ("model.rope.fraction=1.0000001", "rope.fraction=1.0000001 must be at least 0 and at most 1"),
    ("model.rope.fraction=-0.1", "rope.fraction=-0.1 must be at least 0 and at most 1"),
    ("optimizer.learning_rate=-1", "optimizer.learning_rate=-1.0 must be at least 0"),
    ("optimizer.learning_rate=nan", "optimizer.learning_rate=nan must be at least 0"),
    ("model.norm_eps=1e308", "model.norm_eps=1e+308 must be at least 0 and below 1e+30"),
    ("data.span_length=inf", "data.span_length=inf must be at least 1"),
    ("train.batch_size=1000000000000", "must be at least 1 and at most 16777216"),
    ("run.seed=9223372036854775808", "must be at least 0 and at most 4294967295"),
    ("model.d_ff=1000000000000000000", "must be at least 0 and at most 2147483647"),
    ("model.n_layers=1000000", "n_layers=1000000", "at most 10000"),
    # What contradicts another setting.
    ("model.d_model=45", "d_model=45", "model.n_heads=2", "1, 3, 5, 9, 15, 45"),
    ("model.d_model=9699690 model.n_heads=1048576", "divide it (1, 2, 3, 5, 6, 7,", "9699690)"),
    ("model.n_heads=4 model.n_kv_heads=3", "n_heads=4", "n_kv_heads=3", "choose one of 1, 2, 4"),
    ("model.head_dim=15", "head_dim=15 with", "model.positions"),
    ("train.batch_size=8 train.microbatches=3", "batch_size=8", "microbatches=3", "1, 2, 4, 8"),
    ("data.sequence_length=999999", "data.sequence_length=999999", "raise model.max_length"),
    ("model.vocab_size=299", "tokenizer.vocab_size=4096", "model.vocab_size=299", "set it to 0"),
    ("train.eval_tasks_every=3", "eval_tasks_every=3 is no multiple of train.eval_every="),
    ("train.average_from=5", "set train.ema to 1 for the plain mean"),
    ("train.ema=1 train.average_from=600", "leaves no step of train.steps=600"),
    ("optimizer.wsd_decay_fraction=0", "must be at least 1e-06 and below 1"),
    ("optimizer.warmup_steps=10 optimizer.decay_steps=10", "end the decay later"),
    ("optimizer.decay_steps=0 optimizer.warmup_steps=601", "longer than the run, train.steps=600"),
    ("optimizer.warmup_steps=601 optimizer.decay_steps=601", "is longer than the run"),
    ("optimizer.groups=embed:lr", "'embed:lr' is not of the form"),
    ("optimizer.groups=embed:lr_x", "'embed:lr_x' is not of the form"),
    ("optimizer.groups=embed", "'embed' is not of the form 'PATTERN: lr NUMBER decay NUMBER'"),
    ("run.profile=9:5", "run.profile='9:5' names no steps"),
    ("run.profile=599:700", "names step 699", "train.steps=600"),
    ("adapter.kind=lora", "trains an adapter on top of a model", "set run.init_from"),
    ("adapter.tokens=4", "adapter.tokens=4 has no effect with adapter.kind='none'"),
    ("adapter.kind=prompt adapter.rank=4", "adapter.kind='prompt': set adapter.kind=lora"),
    ("adapter.kind=prefix adapter.targets=ffn", "targets='ffn' has no effect"),
    ("adapter.kind=lora adapter.tokens=4", "set adapter.kind=prompt or prefix"),
    ("adapter.kind=prompt adapter.tokens=0", "adapter.tokens=0 must be at least 1"),
    ("adapter.kind=lora adapter.rank=0", "adapter.rank=0 must be at least 1"),
    ("adapter.kind=lora adapter.targets=,", "names no weights: give some"),
    ("adapter.kind=lora adapter.groups=ffn", "adapter.groups: 'ffn' is not of the form"),
    ("adapter.rank=4", "adapter.rank=4 has no effect with adapter.kind='none'"),
    ("tokenizer.add_tokens=<a>", "adds tokens to a model that there is", "set run.init_from"),
    ("tokenizer.add_tokens=<a>,<a>", "<a> twice: name it once"),
]


@pytest.mark.parametrize(("overrides", "parts"), [(row[0], row[1:]) for row in REFUSED])
def test_a_setting_that_cannot_work_is_named(overrides: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(jf.ConfigError) as raised:
        jf.load_config(QUICKSTART, overrides.split())
    message = " ".join(str(raised.value).replace("│", " ").split())
    assert not [part for part in parts if part not in message], message


def test_all_faults_of_a_section_are_told_at_once() -> None:
    with pytest.raises(jf.ConfigError) as raised:
        jf.ModelConfig(d_model=0, n_layers=-1, norm="batch", dropout=float("nan"))  # type: ignore[arg-type]
    assert [line.partition("=")[0] for line in str(raised.value).splitlines()] == [
        "model.d_model",
        "model.n_layers",
        "model.norm",
        "model.dropout",
    ]


def test_groups_of_another_form_are_refused() -> None:
    for factors in ("rate 2", "lr 1 lr 2", "lr -1", "lr inf", "lr 1 decay"):
        with pytest.raises(jf.ConfigError, match=r"^optimizer.groups: .* is not of the form"):
            OptimizerConfig(groups=f"embed: {factors}")


def test_a_type_is_checked_in_python_too() -> None:
    with pytest.raises(jf.ConfigError, match="'none' is not of type float or 'auto'"):
        jf.ModelConfig(attention=jf.Attention(dropout="none"))  # type: ignore[arg-type]
    assert jf.ModelConfig(dropout=0.1).attention_dropout_rate == 0.1
    for text, rate in (("0", 0.0), ("0.25", 0.25), ("auto", 0.0)):
        override = f"model.attention.dropout={text}"
        assert jf.load_config(QUICKSTART, [override]).model.attention_dropout_rate == rate
