"""What the benchmarks train: runs, and the same shapes as flags of the PyTorch worker."""

from dataclasses import replace

from jaxformer import ModelConfig, RunConfig
from jaxformer.config import DataConfig, OptimizerConfig, TrainConfig

GPT2 = ModelConfig(positions="learned", norm="layer", activation="gelu", bias="all", tied_head=True)
LLAMA = ModelConfig(positions="rope", norm="rms", activation="swiglu")


def _run(model: ModelConfig, vocab: int, length: int, batch: int) -> RunConfig:
    return RunConfig(
        model=replace(model, vocab_size=vocab, max_length=length),
        data=DataConfig(sequence_length=length),
        optimizer=OptimizerConfig(learning_rate=6e-4, schedule="constant", warmup_steps=0),
        train=TrainConfig(batch_size=batch),
    )


GPT2_124M = replace(GPT2, n_layers=12, n_heads=12, d_model=768)
TINY_LLAMA = replace(LLAMA, n_layers=22, n_heads=32, n_kv_heads=4, d_model=2048, d_ff=5632)
DECODED = replace(GPT2_124M, activation="gelu_tanh", vocab_size=50_304, max_length=1024)  # as transformers has it
WORKS = {
    "small": _run(replace(GPT2, n_layers=6, n_heads=6, d_model=384), vocab=4096, length=256, batch=16),
    "gpt2_124m": _run(GPT2_124M, vocab=50_304, length=512, batch=2),
    "gpt2_124m_gpu": _run(GPT2_124M, vocab=50_304, length=1024, batch=64),
    "llama_1b_gpu": _run(TINY_LLAMA, vocab=32_000, length=2048, batch=16),
}


def with_sizes(run: RunConfig, batch: int, microbatches: int) -> RunConfig:
    """`run` with another batch (0: its own) in so many microbatches."""
    return replace(run, train=replace(run.train, batch_size=batch or run.train.batch_size, microbatches=microbatches))


def shrunk(run: RunConfig) -> RunConfig:
    """`run` in a size that any machine trains at once, to prove that a benchmark works."""
    heads = 2 if run.model.kv_heads < run.model.n_heads else 4
    model = replace(run.model, n_layers=2, d_model=64, n_heads=4, n_kv_heads=heads, d_ff=128, vocab_size=512, max_length=64)
    return replace(run, model=model, data=DataConfig(sequence_length=64), train=replace(run.train, batch_size=4))


def torch_flags(run: RunConfig) -> list[str]:
    """The run's shape for torch_peer.py."""
    model = run.model
    sizes = {
        "layers": model.n_layers,
        "d_model": model.d_model,
        "heads": model.n_heads,
        "kv_heads": model.kv_heads,
        "d_ff": model.ff_width,
        "vocab": model.vocab_size,
        "length": run.data.sequence_length,
        "batch": run.train.batch_size,
        "rate": run.optimizer.learning_rate,
    }
    flags = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    return [*flags, "--style", "llama" if model.gated else "gpt2"]
