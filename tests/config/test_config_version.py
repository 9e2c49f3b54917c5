"""A run's config.json has a version: those of other versions and unknown names are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

import jaxformer as jf
from jaxformer.config.run import MOVED, VERSION, RunConfig, RunSettings, from_json, to_json
from jaxformer.config.settings import flat
from jaxformer.files import ConfigError

RUN = RunConfig(model=jf.ModelConfig(n_layers=3))


def written(**changes: Any) -> str:
    return json.dumps(json.loads(to_json(RUN)) | changes)


def test_a_config_states_its_version_and_reads_back() -> None:
    assert json.loads(to_json(RUN))["version"] == VERSION == 4
    assert from_json(to_json(RUN), "here") == RUN


def test_what_a_file_lacks_has_its_default() -> None:
    record = json.loads(to_json(RUN))
    del record["model"]["head"]["bias"], record["mesh"]
    assert from_json(json.dumps(record), "here") == RUN


def test_a_file_of_another_version_is_refused_by_name() -> None:
    without = json.loads(to_json(RUN))
    del without["version"]
    texts = {"1": json.dumps(without)}
    texts |= {repr(version): written(version=version) for version in (2, 5, "3", 3.0, True, None)}
    for version, text in texts.items():
        with pytest.raises(
            ConfigError,
            match=rf"here was written by another .*: its version is {version}, .* 3 and 4",
        ):
            from_json(text, "here")


def test_a_file_of_version_3_is_read_with_the_names_of_its_time() -> None:
    """Its settings of a model were all in one section."""
    record = json.loads(to_json(RUN)) | {"version": 3}
    record["model"] = {"n_layers": 3, "rope_theta": 5e5, "n_experts": 4, "feed_forward": "experts"}
    record["model"] |= {"head": "classes", "n_classes": 3, "attention_dropout": "auto"}
    model = from_json(json.dumps(record), "here").model
    assert (model.n_layers, model.rope.theta, model.experts.n) == (3, 5e5, 4)
    assert (model.head.kind, model.head.n_classes) == ("classes", 3)
    with pytest.raises(ConfigError, match=r"model\.rope_theta: It is model\.rope\.theta now\."):
        from_json(json.dumps(record | {"version": 4}), "here")


def test_every_setting_that_has_moved_is_one() -> None:
    settings = flat(jf.ModelConfig())
    assert {*MOVED.values()} <= {*settings} and not {*MOVED} & {*settings}


def test_every_unknown_section_and_field_is_named() -> None:
    record = json.loads(to_json(RUN))
    record["model"] |= {"n_layer": 2, "quantum": True}
    record |= {"adapters": {"rank": 4}, "train": 5}
    with pytest.raises(ConfigError) as raised:
        from_json(json.dumps(record), "here")
    said = str(raised.value).splitlines()
    assert [line.strip().partition(":")[0] for line in said] == [
        "here has settings that this jaxformer does not know",
        "model.n_layer",
        "model.quantum",
        "train",
        "adapters.rank",
    ]
    assert "model.n_layers" in said[1] and "adapter.rank" in said[4]


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "here is not JSON"),
        ("[]", "here holds no JSON object"),
        (
            '{"version": 4, "model": {"n_layers": "3"}}',
            "here: model.n_layers='3' is not of type int",
        ),
        ('{"version": 4, "model": {"n_layers": [3]}}', "here: model.n_layers="),
        ('{"version": 3, "model": []}', "here has settings that this jaxformer does not know"),
        ('{"version": 4, "model": {"norm": ["rms"]}}', "here: model.norm="),
    ],
)
def test_what_is_no_config_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_json(text, "here")
    assert str(raised.value).startswith(said)


def test_the_compilation_cache_of_a_config_json_is_not_used(tmp_path: Path) -> None:
    theirs = RunConfig(run=RunSettings(dir="x", compilation_cache=str(tmp_path / "theirs")))
    found = from_json(to_json(theirs), "config.json")
    assert found.run.compilation_cache == RunSettings().compilation_cache and found.run.dir == "x"


def test_a_setting_that_there_is_not_and_a_value_in_the_place_of_a_record_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'teta' is no setting of Rope: \['theta', 'pairing'"):
        jf.with_settings(jf.ModelConfig(), {"rope.teta": 1.0})
    with pytest.raises(ConfigError, match=r"model\.head='classes' is not a record: give Head\("):
        jf.ModelConfig(head="classes")
