"""The adapters of examples/cs336 compute what PyTorch and NumPy compute, so that the course's tests
run over the library."""

import ast
import importlib.util
import io
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from corpora import prepare

import jaxformer as jf
from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig

FILE = Path(__file__).parents[2] / "examples" / "cs336" / "adapters.py"
NEAR = {"rtol": 1e-4, "atol": 1e-5}
# The course's interface: the adapters of its tests.
INTERFACE = (
    *("linear", "embedding", "swiglu", "scaled_dot_product_attention", "rope", "rmsnorm", "silu"),
    *("multihead_self_attention", "multihead_self_attention_with_rope", "transformer_block"),
    *("transformer_lm", "get_batch", "softmax", "cross_entropy", "gradient_clipping"),
    *("get_lr_cosine_schedule", "save_checkpoint", "load_checkpoint", "train_bpe"),
)
B, T, D, N, FF, V, L = 3, 7, 32, 4, 48, 50, 2


@pytest.fixture(scope="module")
def adapters() -> Any:
    spec = importlib.util.spec_from_file_location("cs336_adapters", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, **NEAR)


def test_there_is_an_adapter_for_each_function_of_the_course(adapters: Any) -> None:
    names = {f"run_{name}" for name in INTERFACE} | {"get_adamw_cls", "get_tokenizer"}
    assert {name for name in vars(adapters) if name.startswith(("run_", "get_"))} == names


def test_adapters_take_only_what_is_public() -> None:
    """No name with an underscore of the library."""
    for node in ast.walk(ast.parse(FILE.read_text())):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        names += [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")]
        assert not [name for name in names if name.startswith("_") and name != "__init__"]


def test_linear_embedding_and_activations_are_those_of_pytorch(adapters: Any) -> None:
    x, weight = drawn(B, T, D), drawn(FF, D, seed=1)
    assert_near(adapters.run_linear(D, FF, weight, x), F.linear(x, weight))
    ids, table = torch.randint(0, V, (B, T)), drawn(V, D, seed=2)
    assert_near(adapters.run_embedding(V, D, table, ids), F.embedding(ids, table))
    assert_near(adapters.run_embedding(V, D, table, ids[0]), table[ids[0]])
    assert_near(adapters.run_silu(x), F.silu(x))
    for dim in (-1, 1):
        assert_near(adapters.run_softmax(x + 100, dim), F.softmax(x, dim))


def swiglu(x: torch.Tensor, gate: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> Any:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def test_swiglu_and_rms_norm_are_those_of_pytorch(adapters: Any) -> None:
    x, weights = drawn(B, T, D), (drawn(FF, D, seed=1), drawn(D, FF, seed=2), drawn(FF, D, seed=3))
    assert_near(adapters.run_swiglu(D, FF, *weights, x), swiglu(x, *weights))
    scale = drawn(D, seed=4)
    expected = F.rms_norm(x, (D,), scale, eps=1e-3)
    assert_near(adapters.run_rmsnorm(D, 1e-3, scale, x), expected)


@pytest.mark.parametrize("leading", [(), (2, B)])
def test_scaled_dot_product_attention_is_that_of_pytorch(
    adapters: Any, leading: tuple[int, ...]
) -> None:
    q, k, v = drawn(*leading, T, 8), drawn(*leading, 9, 8, seed=1), drawn(*leading, 9, 6, seed=2)
    mask = drawn(*leading, T, 9, seed=3) > -0.5
    mask[..., 0] = True  # no query without a key, of which PyTorch makes NaN
    for seen in (mask, None):
        found = adapters.run_scaled_dot_product_attention(q, k, v, seen)
        assert_near(found, F.scaled_dot_product_attention(q, k, v, attn_mask=seen))


def turned(x: torch.Tensor, places: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE as complex numbers: dimensions 2i and 2i + 1 are a number, times exp(i t theta^-2i/H)"""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    angles = places[..., None] * theta ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def test_rope_multiplies_complex_numbers(adapters: Any) -> None:
    x, places = drawn(B, T, D), torch.tensor([5, 0, 3, 3, 17, 2, 1])
    assert_near(adapters.run_rope(D, 500.0, 32, x, places), turned(x, places, 500.0))


def attended(
    x: torch.Tensor, weights: Any, places: torch.Tensor | None = None, theta: float = 0.0
) -> torch.Tensor:
    """Causal multi-head attention, a head at a time; no RoPE without places."""
    q, k, v, out = weights
    total = torch.zeros(*x.shape[:-1], out.shape[0])
    for rows in torch.arange(D).chunk(N):
        parts = [F.linear(x, weight[rows]) for weight in (q, k, v)]
        if places is not None:
            parts[:2] = [turned(part, places, theta) for part in parts[:2]]
        head = F.scaled_dot_product_attention(*parts, is_causal=True)
        total = total + F.linear(head, out[:, rows])
    return total


def test_multi_head_attention_is_that_of_pytorch_head_by_head(adapters: Any) -> None:
    x, weights = drawn(2, B, T, D), [drawn(D, D, seed=number) / D**0.5 for number in range(1, 5)]
    found = adapters.run_multihead_self_attention(D, N, *weights, x)
    assert_near(found, attended(x, weights))
    places = torch.arange(T) * 2 + 1
    with_rope = adapters.run_multihead_self_attention_with_rope
    for given, used in ((places[None], places), (None, torch.arange(T))):
        found = with_rope(D, N, 64, 300.0, *weights, x[0], given)
        assert_near(found, attended(x[0], weights, used, 300.0))


def model_weights() -> dict[str, torch.Tensor]:
    shapes = {"token_embeddings": (V, D), "ln_final": (D,), "lm_head": (V, D)}
    for layer in range(L):
        for name in ("q", "k", "v", "output"):
            shapes[f"layers.{layer}.attn.{name}_proj"] = (D, D)
        shapes |= {f"layers.{layer}.ln{number}": (D,) for number in (1, 2)}
        shapes |= {f"layers.{layer}.ffn.w{number}": (FF, D) for number in (1, 3)}
        shapes[f"layers.{layer}.ffn.w2"] = (D, FF)
    return {
        f"{name}.weight": drawn(*shape, seed=number) / shape[-1] ** 0.5
        for number, (name, shape) in enumerate(shapes.items())
    }


def pre_norm_block(x: torch.Tensor, weights: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    def of(name: str) -> torch.Tensor:
        return weights[f"{prefix}{name}.weight"]

    projections = [of(f"attn.{name}_proj") for name in ("q", "k", "v", "output")]
    normed = F.rms_norm(x, (D,), of("ln1"), eps=1e-5)
    x = x + attended(normed, projections, torch.arange(x.shape[1]), 1e4)
    normed = F.rms_norm(x, (D,), of("ln2"), eps=1e-5)
    return x + swiglu(normed, of("ffn.w1"), of("ffn.w2"), of("ffn.w3"))


def test_the_block_and_the_model_are_those_of_plain_pytorch(adapters: Any) -> None:
    weights, x = model_weights(), drawn(B, T, D)
    own = {name.removeprefix("layers.1."): each for name, each in weights.items()}
    found = adapters.run_transformer_block(D, N, FF, 16, 1e4, own, x)
    assert_near(found, pre_norm_block(x, weights, "layers.1."))
    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(5))
    x = F.embedding(ids, weights["token_embeddings.weight"])
    for layer in range(L):
        x = pre_norm_block(x, weights, f"layers.{layer}.")
    x = F.rms_norm(x, (D,), weights["ln_final.weight"], eps=1e-5)
    logits = adapters.run_transformer_lm(V, 16, D, L, N, FF, 1e4, weights, ids)
    assert_near(logits, F.linear(x, weights["lm_head.weight"]))


def test_cross_entropy_is_that_of_pytorch_for_large_logits_too(adapters: Any) -> None:
    logits, targets = drawn(B * T, V), torch.arange(B * T) % V
    for scale in (1.0, 1000.0):
        found = adapters.run_cross_entropy(scale * logits, targets)
        assert_near(found, F.cross_entropy(scale * logits, targets))


@pytest.mark.parametrize("most", [0.1, 1e6])
def test_gradients_are_clipped_by_their_common_norm(adapters: Any, most: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4, 3)) for _ in range(3)]
    for number, parameter in enumerate(parameters[:2]):
        parameter.grad = drawn(4, 3, seed=number)
    kept = [parameter.grad.clone() for parameter in parameters[:2] if parameter.grad is not None]
    norm = torch.stack([grad.square().sum() for grad in kept]).sum().sqrt()
    adapters.run_gradient_clipping(iter(parameters), most)
    for parameter, grad in zip(parameters[:2], kept, strict=True):
        assert parameter.grad is not None
        assert_near(parameter.grad, grad * min(1.0, most / float(norm)))
    assert parameters[2].grad is None


def trained(make: Any, model: torch.nn.Module, steps: range, optimizer: Any = None) -> Any:
    optimizer = optimizer or make(
        model.parameters(), lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3
    )
    for step in steps:
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
        optimizer.zero_grad()
        model(drawn(5, 4, seed=step)).square().sum().backward()
        optimizer.step()
    return optimizer


def models(count: int) -> list[torch.nn.Linear]:
    made = [torch.nn.Linear(4, 3) for _ in range(count)]
    for model in made[1:]:
        model.load_state_dict(made[0].state_dict())
    return made


def test_adamw_is_that_of_pytorch_with_a_rate_that_changes(adapters: Any) -> None:
    ours, theirs = models(2)
    trained(adapters.get_adamw_cls(), ours, range(20))
    trained(torch.optim.AdamW, theirs, range(20))
    for name, value in theirs.state_dict().items():
        assert_near(ours.state_dict()[name], value)


@pytest.mark.parametrize("kind", ["path", "file"])
def test_training_continues_bitwise_from_a_checkpoint(
    adapters: Any, kind: str, tmp_path: Path
) -> None:
    whole, first, second = models(3)
    make = adapters.get_adamw_cls()
    expected = trained(make, whole, range(8))
    place: Any = tmp_path / "saved.pt" if kind == "path" else io.BytesIO()
    adapters.run_save_checkpoint(first, trained(make, first, range(5)), 5, place)
    if kind == "file":
        place.seek(0)
    optimizer = make(second.parameters())
    assert adapters.run_load_checkpoint(place, second, optimizer) == 5
    trained(make, second, range(5, 8), optimizer)
    for name, value in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)
    assert str(optimizer.state_dict()) == str(expected.state_dict())


@pytest.mark.parametrize("warmup, cycle", [(7, 21), (1, 5), (0, 4)])
def test_the_schedule_is_the_formula_of_the_handout(adapters: Any, warmup: int, cycle: int) -> None:
    high, low = 3e-3, 2e-4
    for it in range(cycle + 4):
        share = min(max(it - warmup, 0) / (cycle - warmup), 1.0)
        expected = low + 0.5 * (1 + np.cos(np.pi * share)) * (high - low)
        expected = high * it / warmup if it < warmup else expected
        found = adapters.run_get_lr_cosine_schedule(it, high, low, warmup, cycle)
        assert found == pytest.approx(expected, rel=1e-9)


def test_batches_are_windows_from_every_place(adapters: Any) -> None:
    dataset = np.arange(40, dtype=np.uint16)
    starts: Counter[int] = Counter()
    for _ in range(100):
        x, y = adapters.run_get_batch(dataset, 16, 7, "cpu")
        assert x.shape == y.shape == (16, 7) and x.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1]) and torch.equal(y - x, torch.ones_like(x))
        starts.update(x[:, 0].tolist())
    assert set(starts) == set(range(33))


TEXT = "low low low lower lower newest newest newest widest<|endoftext|>low " * 3


def test_bpe_merges_the_most_frequent_pair_and_its_tokenizer_reads_it_back(
    adapters: Any, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    vocab, merges = adapters.run_train_bpe(tmp_path / "text.txt", 263, ["<|endoftext|>"])
    assert vocab[0] == b"<|endoftext|>" and vocab[1] == b"\x00" and len(vocab) == 263
    # "lo" occurs 18 times, as often as "ow", which is greater; then it is "l" and "ow".
    assert merges[:2] == [(b"o", b"w"), (b"l", b"ow")]
    tokenizer = adapters.get_tokenizer(vocab, merges, ["<|endoftext|>"])
    ids = tokenizer.encode(TEXT)
    assert ids.count(0) == 3 and tokenizer.decode(ids) == TEXT
    assert list(tokenizer.encode_iterable(TEXT.splitlines(keepends=True))) == ids
    assert b"".join(vocab[token] for token in ids) == TEXT.encode()


def test_line_breaks_around_the_separator_are_tokens_of_the_file_and_not_of_its_documents(
    tmp_path: Path,
) -> None:
    """What docs/cs336.md says of the two ways to count a loss."""
    stories, text = ("A cat sat.", "Another cat ran."), tmp_path / "text.txt"
    text.write_text("".join(f"{story}\n<|endoftext|>\n" for story in stories))
    vocab, merges = jf.tokenizer.train_bpe(text, 270, ["<|endoftext|>"])
    tokenizer = jf.tokenizer.Tokenizer.from_bpe(vocab, merges, ["<|endoftext|>"])
    tokenizer.save(tmp_path / "tokenizer.json")
    cats, others = map(tokenizer.encode, stories)
    (newline,) = tokenizer.encode("\n")
    run = RunConfig(
        data=DataConfig(train=str(text), validation_fraction=0, cache_dir=str(tmp_path / "cache")),
        tokenizer=TokenizerConfig(path=str(tmp_path / "tokenizer.json")),
    )
    store = prepare(run).train.store
    assert store.read(0, store.tokens).tolist() == [*cats, 0, *others, 0]
    around = [newline, 0, newline]
    assert tokenizer.encode(text.read_text()) == [*cats, *around, *others, *around]
