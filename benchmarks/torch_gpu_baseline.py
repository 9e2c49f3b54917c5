"""PyTorch's side of train_gpu.py: torch_baseline's model compiled, in bfloat16 as ours is, with the
device's best attention."""

import argparse
import contextlib
import json
import shutil
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch_baseline import Trainer

BACKENDS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


def attention_seconds(options: argparse.Namespace, backend: SDPBackend) -> float:
    """Of a forward and a backward pass on the run's shapes, the best of five; infinite where the
    backend cannot."""
    width = options.d_model // options.heads
    shapes = [
        (options.batch, heads, options.length, width)
        for heads in (options.heads, *2 * [options.kv_heads])
    ]
    q, k, v = (
        torch.randn(s, device=options.device, dtype=torch.bfloat16, requires_grad=True)
        for s in shapes
    )
    times = []
    try:
        with sdpa_kernel(backend):
            for _ in range(6):
                wait(options)
                begin = time.perf_counter()
                grouped = options.kv_heads != options.heads
                scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=grouped
                ).sum().backward()
                wait(options)
                times.append(time.perf_counter() - begin)
    except RuntimeError:  # not for this device, dtype or shape
        return float("inf")
    return min(times[1:])


def wait(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


def round_residual(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The residual stream is bfloat16 from the first block on, as ours is; autocast alone would
    leave it float32."""
    return (inputs[0].to(torch.bfloat16), *inputs[1:])


def profile(trainer: Trainer, steps: int) -> dict[str, Any]:
    """The kernels of so many steps: lists of name, begin and end in nanoseconds. On a CPU they are
    the operations that call no others."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if trainer.cuda:
        kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(steps):
            trainer.step()
    events = []
    for event in profiler.events():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device or not (trainer.cuda or event.cpu_children):
            span = event.time_range  # in microseconds
            events.append([event.name, 1e3 * span.start, 1e3 * span.end])
    return {"events": events}


def answers(trainer: Trainer, command: str) -> dict[str, Any]:
    try:
        if command.startswith("profile"):
            return profile(trainer, int(command.split()[1]))
        if command == "product":
            # Some CPUs take minutes for a large product in bfloat16.
            return trainer.product(0 if trainer.cuda else 256)
        return trainer.step()
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("layers", "d_model", "heads", "kv_heads", "d_ff", "vocab", "length", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--style", choices=("gpt2", "llama"), required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--torch-mode", default="default", help="mode of torch.compile; none runs eagerly"
    )
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise SystemExit("this PyTorch sees no GPU")
    if not cuda:
        torch.set_num_threads(
            1
        )  # several wait for each other, so on a busy machine a small step takes 70 times as long
    compiled = options.torch_mode != "none" and (cuda or shutil.which("g++") is not None)
    trainer = Trainer(argparse.Namespace(**vars(options), bfloat16=True, compile=False, weights=""))
    trainer.model.blocks[0].register_forward_pre_hook(round_residual)
    if compiled:
        trainer.forward = torch.compile(trainer.model, mode=options.torch_mode)
    torch.set_float32_matmul_precision("high")
    seconds = {
        backend.name: attention_seconds(options, backend)
        for backend in (BACKENDS if cuda else BACKENDS[1:])
    }
    best = min(seconds, key=lambda name: seconds[name])
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    about = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        },
        "kernel": f"{best}, {'torch.compile ' + options.torch_mode if compiled else 'eager'}",
        "attention_seconds": {
            name: value for name, value in seconds.items() if value < float("inf")
        },
    }
    print(json.dumps(about), flush=True)
    with sdpa_kernel(getattr(SDPBackend, best)) if cuda else contextlib.nullcontext():
        for line in sys.stdin:
            if line.strip() == "quit":
                break
            print(json.dumps(answers(trainer, line.strip())), flush=True)


if __name__ == "__main__":
    main()
