"""The rules of updates against their formulas in NumPy; groups of leaves, and kinds of decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from forced_devices import on_eight_devices
from optimizer_variants import VARIANTS
from shapes import model

import jaxformer as jf
from jaxformer.arrays.params import Spec, normal, ones, rows
from jaxformer.config.train import OptimizerConfig
from jaxformer.files import ConfigError
from jaxformer.training.optimizers.groups import Group, group_sizes, leaf_groups
from jaxformer.training.optimizers.run_optimizer import OPTIMIZERS, make_optimizer, unread
from jaxformer.training.optimizers.schedules import make_schedule
from jaxformer.training.optimizers.update_rule import UpdateRule

STEPS = 5
# Two layers of a matrix of 4 inputs and 6 outputs, of one with 3 heads, and of a vector.
HEADS = ("layers", "embed", "heads", "head_dim")
TABLE = {
    "heads": Spec((2, 4, 3, 2), HEADS, normal(1.0), inputs=("embed",)),
    "matrix": Spec((2, 4, 6), ("layers", "embed", "mlp"), normal(1.0), inputs=("embed",)),
    "vector": Spec((2, 6), ("layers", "norm"), ones),
}


# Square matrices alone: the factors of SOAP then have no eigenvalue twice, and so one eigenbasis.
SQUARE = TABLE | {
    "heads": Spec((2, 4, 2, 2), HEADS, normal(1.0), inputs=("embed",)),
    "matrix": Spec((2, 4, 4), ("layers", "embed", "mlp"), normal(1.0), inputs=("embed",)),
}


def random_trees(count, seed=0, table=TABLE):
    rng = np.random.default_rng(seed)
    return [
        {k: rng.normal(size=s.shape).astype("f") for k, s in table.items()} for _ in range(count)
    ]


def config_of(**settings):
    plain = {"schedule": "linear", "warmup_steps": 2, "clip_norm": 0.0, "learning_rate": 0.1}
    return OptimizerConfig(**plain | settings)


def trained(config, table=TABLE, start=None, gradients=None):
    """The parameters after each step of the optimizer, with a gradient for each."""
    schedule = make_schedule(config, STEPS)
    optimizer = make_optimizer(config, schedule, table)
    params = jax.tree.map(jnp.asarray, start or random_trees(1, table=table)[0])
    state, seen = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for gradient in gradients or random_trees(STEPS, seed=1, table=table):
        updates, state = update(gradient, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        seen.append(jax.tree.map(np.asarray, params))
    return seen


def expected_of(config, rule, decay=None, table=TABLE):
    """As `trained`, of a NumPy `rule(name, layer, gradient, step) -> direction`, from step 0, and
    `decay(update, parameter, rate) -> what the step subtracts of it`."""
    rates = [float(make_schedule(config, STEPS)(step)) for step in range(STEPS)]
    params, seen = random_trees(1, table=table)[0], []
    for step, gradient in enumerate(random_trees(STEPS, seed=1, table=table)):
        for name, spec in table.items():
            for layer in range(2):
                w = params[name][layer]
                u = rule(name, layer, gradient[name][layer].astype("d"), step)
                shrunk = decay(u, w, rates[step]) if decay and spec.is_matrix else 0
                params[name][layer] = w - rates[step] * u - shrunk
        seen.append({name: leaf.copy() for name, leaf in params.items()})
    return seen


def assert_equal_steps(found, expected, rtol=2e-5):
    for a, b in zip(found, expected, strict=True):
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=rtol, atol=1e-6, err_msg=name)


def adam(c, nesterov=False):
    """AdamW's direction (arXiv:1711.05101): m / (sqrt(v) + eps) without the bias of m and v."""
    moments = {}

    def rule(name, layer, g, step):
        m, v = moments.get((name, layer), (0, 0))
        m, v = c.b1 * m + (1 - c.b1) * g, c.b2 * v + (1 - c.b2) * g**2
        moments[name, layer] = m, v
        now, ahead = 1 - c.b1 ** (step + 1), 1 - c.b1 ** (step + 2)
        m = c.b1 * m / ahead + (1 - c.b1) * g / now if nesterov else m / now
        return m / (np.sqrt(v / (1 - c.b2 ** (step + 1))) + c.eps)

    return rule


def momentum(c):
    traces = {}

    def rule(name, layer, g, step):
        traces[name, layer] = c.b1 * traces.get((name, layer), 0) + g
        return traces[name, layer]

    return rule


def newton_schulz(matrix):
    """Five iterations of a x + b x^3 + c x^5 on the singular values of a matrix."""
    rows_first = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = rows_first / np.linalg.norm(rows_first)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def by_matrix(c, of_matrix, of_vectors):
    """`of_matrix(key, matrix, step)` of each matrix, or head, and Adam's direction of vectors."""

    def rule(name, layer, g, step):
        if name == "vector":
            return of_vectors(name, layer, g, step)
        if name == "heads" and c.muon_unit == "head":
            heads = [of_matrix((name, layer, h), g[:, h], step) for h in range(g.shape[1])]
            return np.stack(heads, axis=1)
        return of_matrix((name, layer), g.reshape(len(g), -1), step).reshape(g.shape)

    return rule


def muon_formula(c):
    means = {}

    def direction(key, g, step):
        means[key] = c.b1 * means.get(key, 0) + (1 - c.b1) * g
        # Nesterov's momentum, without the bias of the mean and of the gradient.
        ahead, now = 1 - c.b1 ** (step + 2), 1 - c.b1 ** (step + 1)
        mean = c.b1 * means[key] / ahead + (1 - c.b1) * g / now
        return 0.2 * np.sqrt(max(g.shape)) * newton_schulz(mean)

    return by_matrix(c, direction, adam(c, nesterov=True))


def normuon_formula(c):
    means, squares = {}, {}

    def direction(key, g, step):
        means[key] = c.b1 * means.get(key, 0) + (1 - c.b1) * g
        o = newton_schulz(means[key])
        squares[key] = c.b2 * squares.get(key, 0) + (1 - c.b2) * (o**2).mean(0)
        u = o / (np.sqrt(squares[key]) + c.eps)
        return 0.2 * np.sqrt(u.size) * u / np.linalg.norm(u)

    return by_matrix(c, direction, adam(c))


FORMULAS = {
    "adamw": (adam, {}),
    "sgd": (momentum, {}),
    "muon": (muon_formula, {}),
    "muon by heads": (muon_formula, {"muon_unit": "head"}),
    "normuon": (normuon_formula, {"b1": 0.95}),
    "normuon by heads": (normuon_formula, {"muon_unit": "head"}),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_rule_moves_as_its_formula_in_numpy(name):
    formula, settings = FORMULAS[name]
    config = config_of(name=name.split()[0], weight_decay=0.3, **settings)
    expected = expected_of(config, formula(config), decoupled)
    assert_equal_steps(trained(config), expected)


def decoupled(u, w, rate):
    return rate * 0.3 * w


def soap_formula(c):
    states = {}

    def direction(key, g, step):
        if step == 0:
            left, right = (1 - c.b2) * g @ g.T, (1 - c.b2) * g.T @ g
            bases = np.linalg.eigh(left)[1], np.linalg.eigh(right)[1]
            states[key] = 0, 0, left, right, *bases
            return np.zeros_like(g)
        m, v, left, right, q, p = states[key]
        m = c.b1 * m + (1 - c.b1) * g
        v = c.b2 * v + (1 - c.b2) * (q.T @ g @ p) ** 2
        mean, square = m / (1 - c.b1**step), v / (1 - c.b2**step)
        u = q @ ((q.T @ mean @ p) / (np.sqrt(square) + c.eps)) @ p.T
        left, right = c.b2 * left + (1 - c.b2) * g @ g.T, c.b2 * right + (1 - c.b2) * g.T @ g
        if step % 2 == 0:
            q, p = np.linalg.qr(left @ q)[0], np.linalg.qr(right @ p)[0]
        states[key] = m, v, left, right, q, p
        return u

    return by_matrix(c, direction, adam(c))


def test_soap_is_adam_in_the_eigenbasis_of_its_factors(monkeypatch):
    monkeypatch.setattr("jaxformer.training.optimizers.soap.BASIS_EVERY", 2)
    config = config_of(name="soap", weight_decay=0.3)
    expected = expected_of(config, soap_formula(config), decoupled, SQUARE)
    assert_equal_steps(trained(config, SQUARE), expected, rtol=1e-3)


def test_a_side_that_is_too_long_for_soap_has_no_factor():
    config = config_of(name="soap", soap_max_side=4)
    optimizer = make_optimizer(config, lambda step: 0.1, TABLE)
    state = jax.eval_shape(optimizer.init, random_trees(1)[0])
    shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
    assert (2, 4, 4) in shapes and not [shape for shape in shapes if shape[-2:] == (6, 6)]
    assert np.isfinite(trained(config)[-1]["matrix"]).all()


def curved(params, batch, key):
    """A loss whose Hessian is diagonal: the mean row of the batch."""
    return {"loss": ((batch * params["vector"] ** 2 / 2).sum(), len(batch))}


@pytest.mark.parametrize("pieces", [1, 2])
def test_sophia_divides_by_the_diagonal_of_the_hessian_of_the_batch(pieces, monkeypatch):
    monkeypatch.setattr("jaxformer.training.optimizers.sophia.CURVATURE_EVERY", 2)
    monkeypatch.setattr("jaxformer.training.optimizers.sophia.GAMMA", 0.5)
    settings = {"b2": 0.8, "eps": 0.3}
    config = config_of(name="sophia", weight_decay=0.0, **settings)
    still = Spec((2,), ("norm",), ones, trainable=False)
    table = {"vector": Spec((6,), ("norm",), normal(1.0)), "still": still}
    optimizer = make_optimizer(config, lambda step: 0.1, table)
    state = jf.init_state(table, optimizer)
    step = jf.make_step(curved, optimizer, microbatches=pieces)
    w, m, h = np.asarray(state.params["vector"], "d"), 0, 0
    for number in range(STEPS):
        batch = np.random.default_rng(number).normal(1, 1, size=(4, 6)).astype("f")
        diagonal = batch.mean(0)
        m = config.b1 * m + (1 - config.b1) * diagonal * w
        if number % 2 == 0:
            h = 0.8 * h + 0.2 * diagonal
        u = m / np.maximum(0.5 * h, 0.3)
        w = w - 0.1 * np.clip(u, -1, 1)
        state, _ = step(state, batch)
        np.testing.assert_allclose(state.params["vector"], w, rtol=1e-5, atol=1e-6)
    assert (0.5 * h > 0.3).any() and (0.5 * h < 0.3).any()


def test_schedule_free_moves_an_average_of_the_weights():
    config = config_of(name="schedule_free", weight_decay=0.3, warmup_steps=2, schedule="constant")
    rates = [float(make_schedule(config, STEPS)(step)) for step in range(STEPS)]
    y = random_trees(1)[0]
    z, x, squares = dict(y), dict(y), dict.fromkeys(y, 0)
    moves, b1 = trained(config), config.b1
    for step, gradient in enumerate(random_trees(STEPS, seed=1)):
        share = rates[step] ** 2 / sum(rate**2 for rate in rates[: step + 1])
        for name, g in gradient.items():
            squares[name] = config.b2 * squares[name] + (1 - config.b2) * g.astype("d") ** 2
            unbiased = squares[name] / (1 - config.b2 ** (step + 1))
            decay = 0.3 * y[name] if name != "vector" else 0
            z[name] = z[name] - rates[step] * (g / (np.sqrt(unbiased) + config.eps) + decay)
            x[name] = (1 - share) * x[name] + share * z[name]
            y[name] = (1 - b1) * z[name] + b1 * x[name]
        assert_equal_steps([moves[step]], [y], rtol=1e-4)


def test_schedule_free_without_an_average_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer.b1=0.0: schedule_free divides by b1"):
        make_optimizer(config_of(name="schedule_free", b1=0.0), lambda step: 0.1, TABLE)


@pytest.mark.parametrize("name, formula", [("adamw", adam), ("sgd", momentum)])
def test_a_cautious_update_moves_only_where_the_gradient_does(name, formula):
    config = config_of(name=name, cautious=True, weight_decay=0.0)
    rule = formula(config)

    def masked(leaf, layer, g, step):
        u = rule(leaf, layer, g, step)
        m = u * g > 0
        return u * m * m.size / (m.sum() + 1)

    assert_equal_steps(trained(config), expected_of(config, masked))


def test_a_group_multiplies_the_rate_and_the_decay_of_its_leaves_and_of_no_others():
    settings = {"name": "adamw", "weight_decay": 0.3}
    texts = ("", "matrix: lr 0.5 decay 0.25")
    plain, grouped = (trained(config_of(groups=text, **settings)) for text in texts)
    for a, b in zip(plain, grouped, strict=True):
        np.testing.assert_array_equal(a["vector"], b["vector"])
    rule = adam(config_of(**settings))

    def halved(name, *rest):
        return rule(name, *rest) * (0.5 if name != "vector" else 1)

    def decay(u, w, rate):
        return 0.5 * rate * 0.25 * 0.3 * w

    assert_equal_steps(grouped, expected_of(config_of(**settings), halved, decay))


def test_the_groups_name_kinds_names_and_patterns_of_paths():
    specs = jf.specs(model("gpt2"))
    config = OptimizerConfig(groups="lookup: lr 0.3, norm: decay 0, attention: lr 2, *.up: decay 3")
    factors = leaf_groups(config, specs)
    assert factors["embed"]["tokens"].rate == 0.3
    attention = factors["blocks"]["attention"]
    assert attention["q"].rate == 2 and attention["q"].decay == 1 and attention["q_bias"].decay == 0
    assert factors["blocks"]["ffn"]["up"].decay == 3 and factors["blocks"]["ffn"]["down"].decay == 1
    groups = group_sizes(config, specs)
    assert len(groups[Group("lookup", rate=0.3)]) == 2
    assert {group.pattern for group in groups} == {
        "lookup",
        "norm",
        "attention",
        "*.up",
        "all others",
    }
    counted = sum(map(sum, groups.values()))
    assert counted == sum(np.prod(spec.shape) for spec in rows(specs).values())


def test_a_group_without_decay_is_in_the_mask_and_in_the_counts():
    specs = jf.specs(model("gpt2"))
    config = OptimizerConfig(groups="lookup: decay 0")
    assert not leaf_groups(config, specs)["embed"]["tokens"].decay
    fewer = len(group_sizes(OptimizerConfig(), specs)[Group()])
    assert len(group_sizes(config, specs)[Group()]) == fewer - 2


@pytest.mark.parametrize(
    "groups, message",
    [
        ("embd: lr 2", "'embd' fits no leaf .* Did you mean embed.* The names are matrix, lookup"),
        ("attention: lr 2, q: lr 3", "blocks.attention.q is in two groups, 'attention' and 'q'"),
    ],
)
def test_a_pattern_that_fits_no_leaf_or_one_of_another_group_is_refused(groups, message):
    with pytest.raises(ConfigError, match=message):
        leaf_groups(OptimizerConfig(groups=groups), jf.specs(model("gpt2")))


class Recorder:
    """A config that notes which of its settings are read."""

    def __init__(self, config):
        self.config, self.read = config, set()

    def __getattr__(self, name):
        self.read.add(name)
        return getattr(self.config, name)


def settings_read(name):
    """The settings of which a step of a rule is made."""
    recorder = Recorder(OptimizerConfig(name=name))
    optimizer = optax.with_extra_args_support(make_optimizer(recorder, lambda step: 0.1, TABLE))
    of_step = {"hessian_product": jax.tree.leaves, "key": jax.random.key(0)}
    jax.eval_shape(
        lambda p: optimizer.update(p, optimizer.init(p), p, **of_step), random_trees(1)[0]
    )
    return recorder.read


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_a_rule_reads_the_settings_of_its_row(name, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "bare", UpdateRule(lambda c, specs: optax.identity()))
    assert settings_read(name) - settings_read("bare") == {*OPTIMIZERS[name].reads}


def test_a_setting_that_the_rule_does_not_read_is_named():
    assert unread(OptimizerConfig(name="adamw", b2=0.5)) == []
    assert unread(OptimizerConfig(name="sgd", b2=0.5)) == ["optimizer.b2=0.5"]


@pytest.mark.slow
@pytest.mark.xdist_group("eight devices")
def test_the_steps_of_optimizers_equal_those_of_one_device_with_their_state_divided():
    report = on_eight_devices("optimizer_devices.py")
    assert [*report] == [*VARIANTS]
    for name, result in report.items():
        # A basis of SOAP turns by far more than its factors do.
        assert result["apart"] < (2e-3 if "soap" in name else 1e-5), name
        assert result["replicated"] == [], name


def test_adafactor_is_that_of_optax_for_each_matrix_by_the_names_of_its_axes():
    """Heads of 64 are outputs of one matrix; layers and experts are factored and clipped alone."""
    wide = ("layers", "embed", "heads", "head_dim")
    many = ("layers", "experts", "embed", "mlp")
    table = {
        "heads": Spec((2, 130, 3, 64), wide, normal(1.0), inputs=("embed",)),
        "experts": Spec((2, 20, 128, 140), many, normal(1.0), inputs=("embed",)),
        "narrow": Spec((2, 130, 100), ("layers", "embed", "mlp"), normal(1.0), inputs=("embed",)),
        "vector": TABLE["vector"],
    }
    peer = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    rule = OPTIMIZERS["adafactor"].rule(config_of(name="adafactor"), table)
    shape = {"heads": (2, 130, 192), "experts": (40, 128, 140)}
    one_by_one = {k: shape.get(k, s.shape) for k, s in table.items()}
    params = {k: jnp.zeros(s.shape) for k, s in table.items()}
    state = rule.init(params)
    assert max(leaf.size for leaf in jax.tree.leaves(state.squares["heads"])) == 2 * 192
    apart = {k: jnp.zeros(one_by_one[k]) for k in table}
    peers = {k: jax.vmap(peer.init)(apart[k]) for k in table}
    for gradient in random_trees(3, table=table):
        # Layers and experts of different sizes, so that a common clipping would show.
        for name in table:
            sizes = 10.0 ** np.arange(table[name].shape[0])
            gradient[name] *= sizes.reshape(-1, *[1] * (gradient[name].ndim - 1)).astype("f")
        directions, state = rule.update(gradient, state, params)
        for name in table:
            g = gradient[name].reshape(one_by_one[name])
            wanted, peers[name] = jax.vmap(peer.update)(g, peers[name], apart[name])
            np.testing.assert_allclose(
                np.asarray(directions[name]).reshape(g.shape), wanted, rtol=2e-5, atol=1e-7
            )


@pytest.mark.parametrize("name", ["adam", "adamw", "lion", "rmsprop", "sgd"])
def test_half_precision_params_keep_their_dtypes_and_are_warned_of(name):
    """100 steps of 1e-4 move numbers of 0.02; updates of less than 1/256 of a number are lost."""
    optimizer = getattr(optax, name)(1e-4)
    params = {"small": jnp.full((4,), 0.02, jnp.bfloat16), "one": jnp.ones((4,), jnp.bfloat16)}
    with pytest.warns(UserWarning, match="parameters that learn are bfloat16: an update of less"):
        state = jf.init_state(params, optimizer)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, state)

    def loss(params, batch, key):
        total = sum(leaf.astype(jnp.float32).sum() for leaf in params.values())
        return {"loss": (total * batch["x"].sum(), 1.0)}

    step = jf.make_step(loss, optimizer)
    for _ in range(100):
        state, _ = step(state, {"x": np.ones((1,), np.float32)})
    assert jax.tree.map(lambda leaf: leaf.dtype, state) == dtypes
    moved = {k: float(jnp.abs(state.params[k] - params[k]).max()) for k in params}
    assert moved["small"] > 0.004 and moved["one"] == 0
