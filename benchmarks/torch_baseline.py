"""The PyTorch side of the comparison: a worker that trains GPT-2's or Llama's mathematics a step at
a time.

It needs PyTorch and NumPy only, so it can run under another Python than the one that has JAX.
"""

import argparse
import math
import resource
import time
from typing import Any

import numpy as np
import torch
from serving import serve
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal grouped-query attention by the best kernel that PyTorch has."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.width = options.d_model // options.heads
        self.rope = options.style == "llama"
        bias = options.style == "gpt2"
        self.split = [options.heads * self.width] + 2 * [options.kv_heads * self.width]
        self.qkv = nn.Linear(options.d_model, sum(self.split), bias=bias)
        self.out = nn.Linear(options.d_model, options.d_model, bias=bias)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (
            a.unflatten(-1, (-1, self.width)).transpose(1, 2)
            for a in self.qkv(x).split(self.split, dim=-1)
        )
        if self.rope:
            q, k = rotated(q, angles), rotated(k, angles)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1]
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE on halves."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.gated = options.style == "llama"
        bias = options.style == "gpt2"
        self.up = nn.Linear(options.d_model, options.d_ff * (1 + self.gated), bias=bias)
        self.down = nn.Linear(options.d_ff, options.d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(functional.gelu(self.up(x)))
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


def norm(options: argparse.Namespace) -> nn.Module:
    return (
        nn.LayerNorm(options.d_model)
        if options.style == "gpt2"
        else nn.RMSNorm(options.d_model, eps=1e-5)
    )


class Block(nn.Module):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(options), Attention(options)
        self.ffn_norm, self.ffn = norm(options), FeedForward(options)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """gpt2: learned positions, tied head, biases. llama: RoPE, a head of its own, none."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.tokens = nn.Embedding(options.vocab, options.d_model)
        self.positions = (
            nn.Embedding(options.length, options.d_model) if options.style == "gpt2" else None
        )
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.final_norm = norm(options)
        self.head = (
            None
            if options.style == "gpt2"
            else nn.Linear(options.d_model, options.vocab, bias=False)
        )
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(
                    parameter, std=0.02 / math.sqrt(2 * options.layers) if residual else 0.02
                )
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        half = self.options.d_model // self.options.heads // 2
        angles = at[:, None] * 10_000.0 ** (-torch.arange(half, device=tokens.device) / half)
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(at)
        for block in self.blocks:
            x = block(x, angles)
        weight = self.tokens.weight if self.head is None else self.head.weight
        logits = functional.linear(self.final_norm(x), weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def load(model: Decoder, path: str) -> None:
    """The initial values of jaxformer's GPT-2, from an .npz of dotted paths."""
    file = np.load(path)
    d = model.options.d_model

    parts: Any = model  # PyTorch types the attributes of a module as tensors or modules alike

    def put(target: Tensor, value: np.ndarray) -> None:
        target.copy_(torch.from_numpy(np.ascontiguousarray(value)).view_as(target))

    with torch.no_grad():
        put(parts.tokens.weight, file["embed.tokens"])
        put(parts.positions.weight, file["embed.positions"])
        put(parts.final_norm.weight, file["final_norm.scale"])
        put(parts.final_norm.bias, file["final_norm.bias"])
        for i, block in enumerate(parts.blocks):
            for name in ("attention_norm", "ffn_norm"):
                put(getattr(block, name).weight, file[f"blocks.{name}.scale"][i])
                put(getattr(block, name).bias, file[f"blocks.{name}.bias"][i])
            heads = [file[f"blocks.attention.{name}"][i] for name in "qkv"]
            put(
                block.attention.qkv.weight,
                np.concatenate([w.reshape(d, -1) for w in heads], axis=1).T,
            )
            put(
                block.attention.qkv.bias,
                np.concatenate([file[f"blocks.attention.{n}_bias"][i].ravel() for n in "qkv"]),
            )
            put(block.attention.out.weight, file["blocks.attention.out"][i].reshape(-1, d).T)
            put(block.attention.out.bias, file["blocks.attention.out_bias"][i])
            for name in ("up", "down"):
                put(getattr(block.ffn, name).weight, file[f"blocks.ffn.{name}"][i].T)
                put(getattr(block.ffn, name).bias, file[f"blocks.ffn.{name}_bias"][i])


def optimizer_of(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Fused AdamW that decays matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=True)


class Trainer:
    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.cuda = self.device.type == "cuda"
        torch.manual_seed(0)
        model = Decoder(options)
        if options.weights:
            load(model, options.weights)
        self.model = model.to(self.device)
        self.optimizer = optimizer_of(self.model, options.rate)
        self.forward = torch.compile(self.model) if options.compile else self.model
        rows = np.random.default_rng(0).integers(
            options.vocab, size=(options.batch, options.length + 1)
        )
        self.data = torch.from_numpy(rows).to(self.device)
        self.half = torch.autocast(self.device.type, torch.bfloat16, enabled=options.bfloat16)
        self.dtype = torch.bfloat16 if options.bfloat16 else torch.float32

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def step(self) -> dict[str, float]:
        begin = time.perf_counter()
        with self.half:
            loss = self.forward(self.data[:, :-1], self.data[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        self.wait()
        seconds = time.perf_counter() - begin
        peak = (
            torch.cuda.max_memory_allocated()
            if self.cuda
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        return {"seconds": seconds, "loss": value, "peak_bytes": peak}

    def product(self, size: int = 0) -> dict[str, float]:
        """FLOP/s of a large product of random matrices, or of one of this size, the best of
        five."""
        n = size or (8192 if self.cuda else 2048)
        a, b = (torch.randn(n, n, device=self.device, dtype=self.dtype) for _ in range(2))
        times = []
        for _ in range(6):
            self.wait()
            begin = time.perf_counter()
            a @ b
            self.wait()
            times.append(time.perf_counter() - begin)
        return {"flops": 2 * n**3 / min(times[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("layers", "d_model", "heads", "kv_heads", "d_ff", "vocab", "length", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--style", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--rate", type=float, default=6e-4, help="learning rate")
    parser.add_argument(
        "--threads", type=int, default=0, help="CPU threads; 0 leaves PyTorch's choice"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bfloat16", action="store_true", help="products in bfloat16 by autocast")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the forward and backward pass"
    )
    parser.add_argument("--weights", default="", help=".npz of initial values")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    trainer = Trainer(options)
    about = {"versions": {"torch": torch.__version__}, "device": options.device}
    about |= {"threads": torch.get_num_threads()}
    serve(about, {"step": trainer.step, "product": trainer.product})


if __name__ == "__main__":
    main()
