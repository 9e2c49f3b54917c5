"""The options of XLA that programs are compiled with: the rows of the table, which devices they are
for, and what a compiler refuses."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxformer as jf
from jaxformer.arrays.mesh import make_mesh
from jaxformer.tools.plan_memory import abstract_mesh
from jaxformer.training import compiler_options as options
from jaxformer.training.compiler_options import compiler_options, refuses

pytestmark = pytest.mark.fast

VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
LEVEL = {"xla_backend_optimization_level": 1}
GATHERS = "xla_tpu_enable_windowed_einsum_for_all_gather"


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    """The tests are compiled at another level, which their environment names."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def sizes(**axes):
    return {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1} | axes


@pytest.mark.parametrize(
    ("device", "axes", "expected"),
    [
        ("v5e", {"fsdp": 4}, {GATHERS: "false"}),
        ("v5p", {"data": 2, "fsdp": 2}, {GATHERS: "false"}),
        ("v5e", {"data": 4}, {}),
        ("v5e", {"tensor": 4}, {}),
        ("h100", {"fsdp": 4}, {}),
        ("cpu", {"fsdp": 4}, LEVEL),
    ],
)
def test_the_options_are_those_of_the_devices_and_the_mesh(device, axes, expected):
    assert compiler_options(abstract_mesh(4, sizes(**axes), device)) == expected


@pytest.mark.parametrize("device", ["h100", "v5e", "cpu"])
def test_deterministic_steps_have_options_on_a_gpu_alone(device):
    mesh = abstract_mesh(4, sizes(data=4), device)
    added = {**compiler_options(mesh, True)}
    for name in compiler_options(mesh):
        del added[name]
    assert added == (options.DETERMINISTIC if device == "h100" else {})


def test_an_option_of_deterministic_steps_that_a_compiler_lacks_is_an_error(monkeypatch):
    """The compiler for CPUs is asked, and lacks what stands in for one of them."""
    monkeypatch.setattr(options, "platform", lambda mesh: "gpu")
    monkeypatch.setattr(options, "DETERMINISTIC", {"xla_no_such_option": "true"})
    with pytest.raises(jf.ConfigError, match=r"train\.deterministic needs xla_no_such_option"):
        compiler_options(make_mesh(), True)


def test_an_option_that_the_environment_names_is_left_to_it(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "--xla_backend_optimization_level_2=3")
        assert compiler_options() == LEVEL
        flags = "--xla_cpu_enable_fast_math=false --xla_backend_optimization_level=3"
        monkeypatch.setenv(variable, flags)
        assert compiler_options() == {}
        monkeypatch.delenv(variable)


def test_an_option_that_a_compiler_does_not_have_is_left_out(monkeypatch):
    """The compiler for CPUs is asked for the option of TPUs, which it does not have."""
    mesh = make_mesh()
    monkeypatch.setattr(options, "platform", lambda mesh: "tpu")
    monkeypatch.setattr(options, "wanted_options", lambda *how: {GATHERS: "false", **LEVEL})
    assert compiler_options(mesh) == LEVEL


def test_an_option_is_tried_once_and_on_the_mesh_in_force():
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        assert refuses(mesh, "xla_no_such_option", "1")
        assert not refuses(mesh, "xla_backend_optimization_level", "1")
    before = refuses.cache_info().misses
    refuses(mesh, "xla_backend_optimization_level", "1")
    assert refuses.cache_info().misses == before


def loss(params, batch, key):
    return {"loss": (jnp.sum((params["w"] - batch["x"]) ** 2), jnp.float32(len(batch["x"])))}


def test_a_step_has_the_options(monkeypatch):
    asked = []
    jit = jax.jit

    def recorded(function, **arguments):
        asked.append(arguments.get("compiler_options"))
        return jit(function, **arguments)

    optimizer = optax.sgd(0.1)
    step = jf.make_step(loss, optimizer)
    state = jf.init_state({"w": jnp.zeros(2)}, optimizer)
    monkeypatch.setattr(jax, "jit", recorded)
    step(state, {"x": jnp.ones((4, 2))})
    assert asked.count(LEVEL) == 1
