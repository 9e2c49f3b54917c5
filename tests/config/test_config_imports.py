"""Config files import the settings of every section from one place, without JAX."""

import dataclasses
import subprocess
import sys

import jaxformer.config as config
from jaxformer.config.run import RunConfig


def test_every_section_of_a_run_is_imported_from_the_package_of_settings() -> None:
    sections = {type(getattr(RunConfig(), field.name)) for field in dataclasses.fields(RunConfig)}
    assert {getattr(config, section.__name__) for section in sections} == sections
    assert {*config.__all__} == {section.__name__ for section in sections} | {"RunConfig"}


def test_importing_settings_imports_no_jax() -> None:
    code = "from jaxformer.config import *; import sys; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
