"""The PyTorch side of the comparison: GPT-2's mathematics, trained one step per line read from standard input.

Needs only PyTorch, so it can run under another Python than the one that has JAX. Each line read is a JSON object of
`tokens` and `targets` files (.npy, int64 [B, T]) or nothing; each line written is a JSON object with the seconds of the
step, its loss and the peak resident memory in bytes.
"""

import argparse
import json
import math
import resource
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Pre-norm attention and feed-forward, biases everywhere."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.ffn_norm = nn.LayerNorm(d_model)
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.ffn_norm(x))))


class GPT(nn.Module):
    """Learned positions, tied head, no dropout."""

    def __init__(self, layers: int, d_model: int, heads: int, length: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, d_model)
        self.positions = nn.Embedding(length, d_model)
        self.blocks = nn.ModuleList(Block(d_model, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(d_model)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """AdamW that decays matrices only, in the named eager form."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=kind == "fused", foreach=kind == "foreach")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 6), ("d_model", 384), ("heads", 6), ("length", 256), ("batch", 16), ("vocab", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--optimizer", choices=("fused", "foreach", "plain"), default="fused")
    parser.add_argument("--compile", action="store_true", help="torch.compile the forward and backward")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model: nn.Module = GPT(options.layers, options.d_model, options.heads, options.length, options.vocab)
    optimizer = optimizer_of(model, options.optimizer)
    step_model = torch.compile(model) if options.compile else model
    data = torch.randint(options.vocab, (options.batch, options.length + 1))

    for line in sys.stdin:
        if line.strip() == "quit":
            break
        start = time.perf_counter()
        loss = step_model(data[:, :-1], data[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "loss": value, "peak_bytes": peak, "version": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
