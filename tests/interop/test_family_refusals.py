"""What makes no sense is refused at the entry with its reason: settings that exclude each other,
inputs of another family."""

import sys
from pathlib import Path

import numpy as np
import pytest
from families import DOCUMENTS, FAMILIES, LATENT, SIZES, alone, params_of

import jaxformer as jf
from jaxformer.config import rules as config_rules
from jaxformer.config.settings import with_settings
from jaxformer.models.inputs import check_inputs

pytestmark = pytest.mark.fast

EXPERTS = {"feed_forward": "experts", "experts.n": 5}
YARN = {"rope.scaling": "yarn", "rope.factor": 2.0}
DELTA = {"mixer": "delta", "positions": "none", "n_kv_heads": 0}
EXACT = {"exact": True}
MAMBA2 = DELTA | {"mixer": "mamba2"}
LONG = {"rope.scaling": "longrope", "rope.factor": 2.0}
MUP = {"parametrization": "mup", "mup_base": "d_model=16"}
REFUSED = [
    ({"family": "encoder", "head.kind": "language"}, "an encoder sees the next token"),
    ({"head.kind": "masked"}, "head.kind='masked'"),
    ({"head.next_sentence": True}, "next_sentence=True needs"),
    ({"n_heads": 3}, "is not divisible by model.n_heads=3"),
    ({"n_kv_heads": 3}, "is not divisible by model.n_kv_heads=3"),
    ({"head_dim": 5}, "no whole pairs"),
    ({"family": "encoder_decoder", "head.kind": "classes"}, "writes its answer as text"),
    ({"head.kind": "classes", "head.n_classes": 2, "head.pooling": "first"}, "sees itself alone"),
    ({"n_encoder_layers": 2}, "needs model.family='encoder_decoder'"),
    ({"n_layers": 4, "layer_groups": 3}, "layer_groups=3 must divide model.n_layers=4"),
    ({"family": "encoder_decoder", "layer_groups": 1}, "layers share within one stack"),
    ({"residual": "parallel", "norm_placement": "post"}, "sublayers have one sum"),
    ({"residual": "parallel_shared", "norm_placement": "output"}, "one sum and one norm"),
    ({"source_window": 3}, "source_window=3 needs model.family='encoder_decoder'"),
    ({"embedding.source": "separate"}, "='separate' needs model.family='encoder_decoder'"),
    ({"window_pattern": "wx"}, "letters w"),
    ({"window_pattern": ""}, "letters w"),
    ({"rope.pattern": "pw"}, r"letters p \(positions\) and n \(none\)"),
    ({"rope.pattern": "pn", "positions": "alibi"}, "needs model.positions='rope'"),
    (YARN | {"positions": "alibi"}, "needs model.positions='rope'"),
    ({"rope.scaling": "yarn"}, "set both"),
    ({"rope.factor": 2.0}, "set both"),
    ({"positions": "t5", "relative.distance": 4}, "above 4 with model.relative.buckets=8"),
    (
        {"positions": "disentangled", "relative.distance": 5},
        "above 5 with model.relative.buckets=8",
    ),
    (LATENT | {"positions": "disentangled"}, "it multiplies keys"),
    ({"rope.scaling": "yarn", "rope.factor": 2.0, "rope.slow": 32.0}, "above model.rope.slow=32"),
    ({"rope.scaling": "yarn", "rope.factor": 2.0, "rope.theta": 1.0}, "rope.theta=1 above 1"),
    (LONG | {"rope.short_factor": "1 -1"}, "rope.short_factor='1 -1' must be . numbers above 0"),
    (LONG | {"rope.original_length": 1}, "rope.original_length=1 must be 2 or more"),
    ({"embedding.positions": "learned", "positions": "sinusoidal"}, "='learned' needs"),
    ({"head.pooler": True}, "pooler=True needs model.family='encoder'"),
    ({"family": "encoder", "head.bias": True}, "the other heads always have a bias"),
    ({"embedding.position_offset": 2}, "needs model.positions='learned'"),
    ({"rope.window_theta": 10.0}, "a model.window"),
    ({"rope.window_theta": 0.5, "window": 3}, "at least 1"),
    ({"rope.window_theta": 9.0, "window": 3, "positions": "none"}, "it is a base of RoPE"),
    ({"embedding.width": 6, "tied_head": True}, "embedding.width=6 with model.tied_head=True"),
    ({"unnormed_layers": 1, "norm_placement": "post"}, "no norm is before a mixer"),
    ({"saved": "q"}, "saved='q' needs model.remat='names'"),
    ({"remat": "names", "saved": "q, gates"}, "names of latent q k v attention out gate up"),
    ({"remat": "names", "offload": "none"}, "offload='none' must be names of"),
    ({"remat": "names", "saved": "input"}, "saved='input' must be names of"),
    ({"remat": "full", "offload": "attention"}, "offload='attention' needs model.remat='names'"),
    (EXPERTS | {"experts.per_token": 9}, "experts.per_token=9 is above model.experts.n=5"),
    (EXPERTS | {"experts.shared_gate": True}, "shared_gate=True needs model.experts.shared_ff"),
    (EXPERTS | {"experts.n": 0}, "feed_forward='experts' needs model.experts.n"),
    ({"experts.n": 4}, "experts.n=4 needs model.feed_forward='experts'"),
    (EXPERTS | {"experts.pattern": "ex"}, r"must be letters e \(experts\) and d \(dense\)"),
    (EXPERTS | {"experts.groups": 2}, "is not divisible by model.experts.groups=2"),
    (EXPERTS | {"experts.groups": 5, "experts.top_groups": 6}, "experts.top_groups=6 is above"),
    (EXPERTS | {"experts.groups": 5}, "raise model.experts.top_groups"),
    (LATENT | {"latent.kv_rank": 0}, "mixer='latent' needs model.latent.kv_rank"),
    (LATENT | {"latent.rope_head_dim": 0}, "latent.rope_head_dim=0 must be 1 to 5"),
    (LATENT | {"latent.rope_head_dim": 6}, "latent.rope_head_dim=6 must be 1 to 5"),
    (LATENT | {"latent.rope_head_dim": 1}, "latent.rope_head_dim=1 with model.rope.fraction=1"),
    (LATENT | {"n_kv_heads": 2}, "n_kv_heads=2 needs model.mixer='attention'"),
    (
        LATENT | {"attention.query_key_norm": "head"},
        "attention.query_key_norm='head' needs model.mixer='attention'",
    ),
    (LATENT | {"attention.output_gate": True}, "the other mixers have none, or their own"),
    (LATENT | {"attention.temperature": 0.1}, "temperature=0.1 needs model.mixer='attention'"),
    (LATENT | {"mixer": "attention"}, "latent.kv_rank=6 needs model.mixer='latent'"),
    (DELTA | {"positions": "rope"}, "it reads tokens in their order"),
    (DELTA | {"window": 8}, "window=8 is for keys of all tokens"),
    (DELTA | {"family": "encoder"}, "choose model.family='decoder'"),
    (DELTA | {"recurrent.key_heads": 3}, "key_heads=3 must divide the 4 heads"),
    (MAMBA2 | {"positions": "rope"}, "it reads tokens in their order"),
    (MAMBA2 | {"window": 8}, "window=8 is for keys of all tokens, and model.mixer='mamba2' has"),
    (MAMBA2 | {"recurrent.decay": "channel"}, "decay='channel' is for model.mixer='delta'"),
    (EXACT | EXPERTS | {"experts.capacity": 1.0}, "dropped because of the others in its row"),
    (EXACT | {"rope.scaling": "dynamic", "rope.factor": 2.0}, "by the length of the text"),
    (
        EXACT
        | {"family": "encoder", "head.kind": "classes", "head.n_classes": 2}
        | {"head.pooling": "mean"},
        "the order of a mean over tokens depends on the row",
    ),
    (MAMBA2 | {"recurrent.rank": 3}, "recurrent.rank=3 is for model.mixer='delta'"),
    (DELTA | {"recurrent.norm_placement": "pre"}, "with one mixer set model.norm_placement"),
    ({"layer_pattern": "da"}, r"m \(model.mixer\), d \(delta\) and s \(mamba2\)"),
    ({"recurrent.chunk": 8}, "or of d or s in model.layer_pattern"),
    ({"mup_base": "d_model=16"}, "mup_base='d_model=16' needs model.parametrization='mup'"),
    ({"parametrization": "mup"}, "mup_base='' must be widths of the model"),
    (MUP | {"embedding.scale": "sqrt"}, "needs model.parametrization='standard': it changes with"),
    (MUP | {"head.scale": "rsqrt"}, "give the number at all widths as model.head.divisor"),
    ({"parametrization": "mup", "mup_base": "d_model=15"}, "mup_base='d_model=15' is no model"),
]


@pytest.mark.parametrize("changes, reason", REFUSED, ids=str)
def test_a_combination_that_makes_no_sense_is_refused_with_its_reason(changes, reason):
    with pytest.raises(jf.ConfigError, match=reason):
        with_settings(jf.ModelConfig(), SIZES | changes)


def test_every_rule_of_the_model_settings_is_tested():
    """Each message in the file of the rules is reached by one of the settings above."""
    source, reached = Path(config_rules.__file__), set()
    messages = []

    def trace(frame, event, argument):
        if frame.f_code.co_filename == str(source):
            reached.add(frame.f_lineno)
            return trace
        return None

    with_settings(jf.ModelConfig(), SIZES)  # breaks none
    sys.settrace(trace)
    try:
        for changes, _ in REFUSED:
            try:
                with_settings(jf.ModelConfig(), SIZES | changes)
            except jf.ConfigError as error:
                messages.append(str(error))
    finally:
        sys.settrace(None)
    lines = enumerate(source.read_text().splitlines(), start=1)
    rules = {number for number, line in lines if line.lstrip().startswith("yield ")}
    assert rules <= reached
    reasons = {why for needed_by in config_rules.NEEDS.values() for why in needed_by.values()}
    assert not [why for why in reasons if why not in "".join(messages)]


CALLS = [
    ("decoder", {"source": np.zeros((4, 5), int)}, "source= is for an encoder-decoder"),
    ("encoder_decoder", {}, "reads source"),
    ("encoder_decoder", {"source": np.zeros((2, 5), int)}, "source has 2 rows, and tokens 4"),
    (
        "encoder_decoder",
        {"source": np.zeros((4, 5), int), "source_segment_ids": np.zeros((4, 7), int)},
        "source_segment_ids",
    ),
    ("encoder", {"segment_ids": np.zeros((4, 7), int)}, r"segment_ids has shape \[4, 7\]"),
    ("encoder", {"source_segment_ids": np.zeros((4, 7), int)}, "belongs to a source"),
    ("decoder", {"token_types": np.zeros((4, 6), int)}, "token_types need"),
]


@pytest.mark.parametrize("family, inputs, reason", CALLS, ids=[reason for *_, reason in CALLS])
def test_inputs_that_do_not_fit_are_refused_with_their_reason(family, inputs, reason):
    config = with_settings(jf.ModelConfig(), SIZES | {"family": family})
    with pytest.raises(jf.ConfigError, match=reason):
        check_inputs(config, {"tokens": DOCUMENTS["tokens"], **inputs})


@pytest.mark.parametrize("family", FAMILIES)
def test_learned_positions_refuse_what_is_longer_than_their_table(family):
    config = with_settings(
        jf.ModelConfig(), SIZES | {"family": family, "positions": "learned", "max_length": 5}
    )
    with pytest.raises(jf.ConfigError, match="max_length=5"):
        jf.forward(params_of(config), config, **alone(config))
