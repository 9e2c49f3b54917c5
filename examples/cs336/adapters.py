"""The tests of Stanford's CS336, assignment 1, over this library.

    git clone https://github.com/stanford-cs336/assignment1-basics
    cp examples/cs336/adapters.py assignment1-basics/tests/adapters.py
    cd assignment1-basics && pytest      # with jaxformer, torch, einops, tiktoken and psutil

Each adapter is a few lines over public functions. PyTorch's tensors become arrays on the way in and
tensors on the way out; weights, which PyTorch stores as [outputs, inputs], are transposed. The
softmax is JAX's, the clipping optax's and the checkpoint PyTorch's, as its objects are: see
docs/cs336.md.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterable
from typing import IO, Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import jaxformer as jf
from jaxformer import layers
from jaxformer.arrays.params import Spec, lookup, zeros
from jaxformer.config import OptimizerConfig
from jaxformer.config.settings import with_settings
from jaxformer.data.rows import window_start
from jaxformer.layers.ffn import ACTIVATIONS
from jaxformer.layers.linear import linear
from jaxformer.training.optimizers.run_optimizer import make_optimizer
from jaxformer.training.optimizers.schedules import make_schedule

Tensor = torch.Tensor
File = str | os.PathLike[str] | BinaryIO | IO[bytes]
STEPS = itertools.count()  # of run_get_batch, which is not told its step


def array(tensor: Tensor) -> jax.Array:
    return jnp.asarray(tensor.detach().cpu().numpy())


def tensor(found: jax.Array) -> Tensor:
    return torch.from_numpy(np.array(found))


def run_linear(d_in: int, d_out: int, weights: Tensor, in_features: Tensor) -> Tensor:
    rows = array(in_features).reshape(-1, d_in)
    out = linear("TD,FD->TF", {"weight": array(weights)}, "weight", rows)
    return tensor(out.reshape(*in_features.shape[:-1], d_out))


def run_embedding(vocab_size: int, d_model: int, weights: Tensor, token_ids: Tensor) -> Tensor:
    return tensor(lookup(array(weights), array(token_ids), (None,) * (token_ids.ndim + 1)))


def run_silu(in_features: Tensor) -> Tensor:
    return tensor(ACTIVATIONS["silu"](array(in_features)))


def run_swiglu(
    d_model: int,
    d_ff: int,
    w1_weight: Tensor,
    w2_weight: Tensor,
    w3_weight: Tensor,
    in_features: Tensor,
) -> Tensor:
    gate, down, up = (array(weight).T for weight in (w1_weight, w2_weight, w3_weight))
    return tensor(layers.swiglu(array(in_features), gate, up, down))


def run_rmsnorm(d_model: int, eps: float, weights: Tensor, in_features: Tensor) -> Tensor:
    return tensor(layers.rms_norm(array(in_features), array(weights), eps))


def run_softmax(in_features: Tensor, dim: int) -> Tensor:
    return tensor(jax.nn.softmax(array(in_features), axis=dim))


def run_scaled_dot_product_attention(
    Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None
) -> Tensor:
    q, k, v = (array(each)[..., None, :] for each in (Q, K, V))  # [..., T, 1, H]: one head
    seen = None if mask is None else array(mask).astype(bool)
    return tensor(layers.dot_product_attention(q, k, v, seen)[..., 0, :])


def run_rope(
    d_k: int, theta: float, max_seq_len: int, in_query_or_key: Tensor, token_positions: Tensor
) -> Tensor:
    x = array(in_query_or_key)[..., None, :]
    return tensor(layers.rope(x, array(token_positions), theta, "interleaved")[..., 0, :])


def attention_params(weights: Iterable[Tensor], heads: int) -> dict[str, Any]:
    """The params of attention from matrices of queries, keys, values and output, whose rows (of the
    output: columns) are those of the heads, one after the other."""
    q, k, v, out = weights

    def into_heads(weight: Tensor) -> jax.Array:
        return array(weight).T.reshape(weight.shape[1], heads, -1)  # [N H, D] -> [D, N, H]

    onto = array(out).T.reshape(heads, -1, out.shape[0])  # [D, N H] -> [N, H, D]
    return {"q": into_heads(q), "k": into_heads(k), "v": into_heads(v), "out": onto}


def attend(
    config: jf.ModelConfig, params: Any, in_features: Tensor, positions: Tensor | None = None
) -> Tensor:
    shape = in_features.shape
    rows = array(in_features).reshape(-1, *shape[-2:])  # [..., T, D] -> [B, T, D]
    if positions is not None:
        places = jnp.broadcast_to(array(positions), shape[:-1]).reshape(rows.shape[:2])
        return tensor(jf.multi_head_attention(params, config, rows, positions=places)).view(shape)
    return tensor(jf.multi_head_attention(params, config, rows)).view(shape)


def run_multihead_self_attention(
    d_model: int,
    num_heads: int,
    q_proj_weight: Tensor,
    k_proj_weight: Tensor,
    v_proj_weight: Tensor,
    o_proj_weight: Tensor,
    in_features: Tensor,
) -> Tensor:
    config = jf.ModelConfig(d_model=d_model, n_heads=num_heads, positions="none")
    weights = (q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight)
    return attend(config, attention_params(weights, num_heads), in_features)


def rotated(d_model: int, heads: int, length: int, theta: float, **more: Any) -> jf.ModelConfig:
    """The settings of the course's model: ours, with RoPE of dimensions 2i and 2i + 1."""
    return with_settings(
        jf.ModelConfig(),
        {
            "d_model": d_model,
            "n_heads": heads,
            "max_length": length,
            "rope.theta": theta,
            "rope.pairing": "interleaved",
            **more,
        },
    )


def run_multihead_self_attention_with_rope(
    d_model: int,
    num_heads: int,
    max_seq_len: int,
    theta: float,
    q_proj_weight: Tensor,
    k_proj_weight: Tensor,
    v_proj_weight: Tensor,
    o_proj_weight: Tensor,
    in_features: Tensor,
    token_positions: Tensor | None = None,
) -> Tensor:
    config = rotated(d_model, num_heads, max_seq_len, theta)
    weights = (q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight)
    return attend(config, attention_params(weights, num_heads), in_features, token_positions)


def block_params(weights: dict[str, Tensor], heads: int, prefix: str = "") -> dict[str, Any]:
    """The params of a block from the tensors whose names begin with `prefix`."""
    projections = (f"{prefix}attn.{name}_proj.weight" for name in ("q", "k", "v", "output"))
    gate, down, up = (array(weights[f"{prefix}ffn.w{number}.weight"]).T for number in (1, 2, 3))
    return {
        "attention_norm": {"scale": array(weights[f"{prefix}ln1.weight"])},
        "attention": attention_params((weights[name] for name in projections), heads),
        "ffn_norm": {"scale": array(weights[f"{prefix}ln2.weight"])},
        "ffn": {"gate": gate, "up": up, "down": down},
    }


def run_transformer_block(
    d_model: int,
    num_heads: int,
    d_ff: int,
    max_seq_len: int,
    theta: float,
    weights: dict[str, Tensor],
    in_features: Tensor,
) -> Tensor:
    config = rotated(d_model, num_heads, max_seq_len, theta, d_ff=d_ff)
    params = block_params(weights, num_heads)
    return tensor(jf.transformer_block(params, config, array(in_features)))


def run_transformer_lm(
    vocab_size: int,
    context_length: int,
    d_model: int,
    num_layers: int,
    num_heads: int,
    d_ff: int,
    rope_theta: float,
    weights: dict[str, Tensor],
    in_indices: Tensor,
) -> Tensor:
    more = {"vocab_size": vocab_size, "n_layers": num_layers, "d_ff": d_ff}
    config = rotated(d_model, num_heads, context_length, rope_theta, **more)
    blocks = [block_params(weights, num_heads, f"layers.{i}.") for i in range(num_layers)]
    params = {
        "embed": {"tokens": array(weights["token_embeddings.weight"])},
        "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks),
        "final_norm": {"scale": array(weights["ln_final.weight"])},
        "head": {"weight": array(weights["lm_head.weight"])},
    }
    return tensor(jf.forward(params, config, array(in_indices)))


def run_cross_entropy(inputs: Tensor, targets: Tensor) -> Tensor:
    total, weight = jf.softmax_cross_entropy(array(inputs), array(targets))
    return tensor(total / weight)


def run_gradient_clipping(parameters: Iterable[torch.nn.Parameter], max_l2_norm: float) -> None:
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    rule = optax.clip_by_global_norm(max_l2_norm)  # that of `make_optimizer`
    clipped, _ = rule.update([array(gradient) for gradient in found], optax.EmptyState())
    for gradient, smaller in zip(found, clipped, strict=True):
        gradient.copy_(tensor(smaller))


@functools.cache
def update_rule(
    b1: float, b2: float, eps: float, weight_decay: float
) -> tuple[optax.GradientTransformation, Callable[..., Any]]:
    """AdamW of train.py at the learning rate 1, for params {"weight": array}; and its jitted
    update."""
    config = OptimizerConfig(
        name="adamw", b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, decay="all", clip_norm=0.0
    )
    rule = make_optimizer(config, lambda step: 1.0, {"weight": Spec((), (), zeros)})
    return rule, jax.jit(rule.update)


class AdamW(torch.optim.Optimizer):
    """PyTorch's interface of an optax rule. The state of a parameter is that of the rule: its
    leaves by number, arrays as tensors and counts as numbers."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, given)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            rule, update = update_rule(*group["betas"], group["eps"], group["weight_decay"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                held, params = self.state[parameter], {"weight": array(parameter)}
                leaves, tree = jax.tree.flatten(rule.init(params))
                if held:
                    leaves = [jnp.asarray(held[str(number)]) for number in range(len(leaves))]
                gradient = {"weight": array(parameter.grad)}
                change, new = update(gradient, jax.tree.unflatten(tree, leaves), params)
                parameter.add_(tensor(change["weight"]), alpha=group["lr"])
                for number, leaf in enumerate(jax.tree.leaves(new)):
                    held[str(number)] = tensor(leaf) if leaf.ndim else leaf.item()
        return loss


def get_adamw_cls() -> type[torch.optim.Optimizer]:
    return AdamW


def run_get_lr_cosine_schedule(
    it: int,
    max_learning_rate: float,
    min_learning_rate: float,
    warmup_iters: int,
    cosine_cycle_iters: int,
) -> float:
    early = min(warmup_iters, 1)  # our step s is their iteration s + 1: we have no step of rate 0
    config = OptimizerConfig(
        schedule="cosine",
        learning_rate=max_learning_rate,
        final_fraction=min_learning_rate / max_learning_rate,
        warmup_steps=warmup_iters - early,
        decay_steps=cosine_cycle_iters - early,
    )
    with jax.enable_x64(True):
        return float(make_schedule(config, cosine_cycle_iters)(it - early))


def run_get_batch(
    dataset: np.ndarray, batch_size: int, context_length: int, device: str
) -> tuple[Tensor, Tensor]:
    """The windows that data.order=random would draw of this array at seed 0, a step a call."""
    first, places = next(STEPS) * batch_size, len(dataset) - context_length
    starts = [window_start(0, first + row, places) for row in range(batch_size)]
    rows = [dataset[start : start + context_length + 1] for start in starts]
    tokens = torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)  # [B, T + 1]
    return tokens[:, :-1], tokens[:, 1:]


def run_save_checkpoint(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, iteration: int, out: File
) -> None:
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**states, "iteration": iteration}, out)


def run_load_checkpoint(src: File, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    saved = torch.load(src, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["iteration"])


def get_tokenizer(
    vocab: dict[int, bytes],
    merges: list[tuple[bytes, bytes]],
    special_tokens: list[str] | None = None,
) -> jf.tokenizer.Tokenizer:
    return jf.tokenizer.Tokenizer.from_bpe(vocab, merges, special_tokens)


def run_train_bpe(
    input_path: str | os.PathLike[str], vocab_size: int, special_tokens: list[str], **kwargs: Any
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    return jf.tokenizer.train_bpe(os.fspath(input_path), vocab_size, special_tokens)
