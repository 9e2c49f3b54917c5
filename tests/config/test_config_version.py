"""A run's config.json has a version: older ones are read, newer ones and unknown names refused."""

import json
from pathlib import Path
from typing import Any

import pytest

import jaxformer as jf
from jaxformer.config import saved as config_json
from jaxformer.config.config_file import parse_fields
from jaxformer.config.run import FORMER_OBJECTIVES, DataConfig, RunConfig, RunSettings
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


@pytest.mark.parametrize("former", FORMER_OBJECTIVES)
def test_the_former_name_of_an_objective_is_read_and_said(former: str, tmp_path: Path) -> None:
    name = FORMER_OBJECTIVES[former]
    file = tmp_path / "own.py"
    file.write_text("from jaxformer.config.run import RunConfig\nconfig = RunConfig()\n")
    old = to_json(RunConfig(data=DataConfig(objective=name))).replace(f'"{name}"', f'"{former}"')
    reads = {
        "in Python": lambda: RunConfig(data=DataConfig(objective=former)),
        "config.json": lambda: from_json(old, "here"),
        "the command line": lambda: jf.load_config(file, [f"data.objective={former}"]),
        "arguments": lambda: parse_fields(RunConfig(), ["--data.objective", former], "train.py"),
    }
    for where, read in reads.items():
        with pytest.warns(FutureWarning, match=rf"{former}' is now called '{name}'"):
            assert read().data.objective == name, where
    config = jf.ModelConfig(vocab_size=8, d_model=8, n_heads=2, n_layers=1)
    assert jf.loss_of(former, config).__wrapped__ is jf.loss_of(name, config).__wrapped__


def test_the_compilation_cache_of_a_config_json_is_not_used(tmp_path: Path) -> None:
    theirs = RunConfig(run=RunSettings(dir="x", compilation_cache=str(tmp_path / "theirs")))
    found = from_json(to_json(theirs), "config.json")
    assert found.run.compilation_cache == RunSettings().compilation_cache and found.run.dir == "x"
