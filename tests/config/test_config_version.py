"""A run's config.json has a version: older ones are read, newer ones and unknown names refused."""

import json
from pathlib import Path
from typing import Any

import pytest

import jaxformer as jf
from jaxformer.config import saved as config_json
from jaxformer.config.run import RunConfig, RunSettings
from jaxformer.config.saved import VERSION, from_json, to_json
from jaxformer.files import ConfigError

RUN = RunConfig(model=jf.ModelConfig(n_layers=3))


def written(**changes: Any) -> str:
    return json.dumps(json.loads(to_json(RUN)) | changes)


def test_a_config_states_its_version_and_reads_back() -> None:
    assert json.loads(to_json(RUN))["version"] == VERSION == 2
    assert from_json(to_json(RUN), "here") == RUN


def test_a_file_without_a_version_is_of_the_first_and_what_it_lacks_has_its_default() -> None:
    record = json.loads(to_json(RUN))
    del record["version"], record["model"]["head_bias"], record["mesh"]
    assert from_json(json.dumps(record), "here") == RUN


def test_a_newer_file_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"a/config.json was written by a newer.*version is 3.*Upgrade"
    ):
        from_json(written(version=VERSION + 1), "runs/a/config.json")


@pytest.mark.parametrize("version", ["2", 0, True, None])
def test_a_version_that_is_no_number_is_refused(version: Any) -> None:
    with pytest.raises(ConfigError, match=r"here: version=.* must be a whole number"):
        from_json(written(version=version), "here")


def test_every_unknown_section_and_field_is_named() -> None:
    record = json.loads(to_json(RUN))
    record["model"] |= {"n_layer": 2, "quantum": True}
    record |= {"adapters": {"rank": 4}, "train": 5}
    with pytest.raises(ConfigError) as raised:
        from_json(json.dumps(record), "here")
    said = str(raised.value).splitlines()
    assert [line.strip().partition(":")[0] for line in said] == [
        "here has settings that this jaxformer does not know",
        *("model.n_layer", "model.quantum", "train", "adapters.rank"),
    ]
    assert "model.n_layers" in said[1] and "no such section" in said[4] and "mesh" in said[4]


def test_a_renamed_field_is_read_under_its_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = {2: {"model.depth": "model.layers"}, 3: {"model.layers": "model.n_layers"}}
    monkeypatch.setattr(config_json, "RENAMED", renamed)
    monkeypatch.setattr(config_json, "VERSION", 3)
    for version, name in ((1, "depth"), (2, "layers"), (3, "n_layers")):
        record = json.loads(to_json(RUN)) | {"version": version}
        record["model"][name] = record["model"].pop("n_layers")
        assert from_json(json.dumps(record), "here") == RUN
    with pytest.raises(ConfigError, match=r"model.depth: "):
        from_json(json.dumps({"version": 3, "model": {"depth": 3}}), "here")


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "here is not JSON"),
        ("[]", "here holds no JSON object"),
        ('{"model": {"n_layers": "3"}}', "here: model.n_layers='3' is not of type int"),
        ('{"model": {"n_layers": [3]}}', "here: model.n_layers="),
        ('{"model": {"norm": ["rms"]}}', "here: model.norm="),
    ],
)
def test_what_is_no_config_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_json(text, "here")
    assert str(raised.value).startswith(said)


def test_a_setting_that_is_gone_is_read_by_default_and_else_refused_by_name() -> None:
    record = json.loads(to_json(RUN))
    record["data"]["length_warmup"] = ""
    assert from_json(json.dumps(record), "here") == RUN
    record["data"]["length_warmup"] = "64; 500: 128"
    with pytest.raises(ConfigError, match=r"here sets data\.length_warmup, which .*init_from"):
        from_json(json.dumps(record), "here")


def test_the_compilation_cache_of_a_config_json_is_not_used(tmp_path: Path) -> None:
    theirs = RunConfig(run=RunSettings(dir="x", compilation_cache=str(tmp_path / "theirs")))
    found = from_json(to_json(theirs), "config.json")
    assert found.run.compilation_cache == RunSettings().compilation_cache and found.run.dir == "x"
