"""What the benchmarks train: runs, and their shapes as flags of the PyTorch worker; small ones
too."""

import random
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

from jaxformer import ModelConfig, RunConfig, load_config
from jaxformer.config.run import DataConfig
from jaxformer.config.settings import choices
from jaxformer.config.train import OptimizerConfig, TrainConfig

CONFIGS = Path(__file__).resolve().parent.parent / "configs"

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
# GPT-2 with the approximate GELU, as transformers has it
DECODED = replace(GPT2_124M, activation="gelu_tanh", vocab_size=50_304, max_length=1024)
SMOKE_DECODED = replace(DECODED, n_layers=2, n_heads=2, d_model=32, vocab_size=512, max_length=64)
# The shape of SmolLM2-135M, deep and narrow.
SMOLLM2 = ModelConfig(
    vocab_size=49_152,
    d_model=576,
    n_layers=30,
    n_heads=9,
    n_kv_heads=3,
    d_ff=1536,
    max_length=2048,
    norm="rms",
    activation="swiglu",
    positions="rope",
    bias="none",
    tied_head=True,
)
DECODED_SHAPES = {"gpt2_124m": DECODED, "smollm2_135m": SMOLLM2}
SMOKE_FIELDS: dict[str, object] = {  # of a run of train.py, for a smoke test
    "model.d_model": 32,
    "model.n_heads": 2,
    "model.n_layers": 1,
    "data.sequence_length": 32,
    "data.validation_fraction": 0.1,
    "tokenizer.vocab_size": 300,
    "train.batch_size": 4,
    "optimizer.warmup_steps": 1,
}


def _config(name: str, batch: int) -> RunConfig:
    """A config of configs/ without dropout, which the kernels of cuDNN and Pallas lack."""
    run = load_config(CONFIGS / f"{name}.py")
    model = replace(run.model, dropout=0.0)
    return with_sizes(replace(run, model=model), batch, 1)


def with_sizes(run: RunConfig, batch: int, microbatches: int) -> RunConfig:
    """`run` with another batch (0: its own) in so many microbatches (0: as "auto" selects)."""
    rows = batch or run.train.batch_size
    return replace(
        run, train=replace(run.train, batch_size=rows, microbatches=microbatches or "auto")
    )


def _accelerator_workloads() -> dict[str, RunConfig]:
    gpt2 = _run(GPT2_124M, vocab=50_304, length=1024, batch=64)
    window = replace(TINY_LLAMA, window=1024)
    experts = replace(load_config(CONFIGS / "olmoe_1b_7b.py").model, n_layers=4)
    found = {
        "gpt2_124m_gpu": gpt2,
        "llama_1b_gpu": _run(TINY_LLAMA, vocab=32_000, length=2048, batch=16),
        "gpt2_124m_packed": replace(gpt2, data=replace(gpt2.data, packing="documents")),
        "bert_base_padded": _config("bert_base", batch=128),
        "t5_small_padded": _config("t5_small", batch=128),
        "llama_1b_window": _run(window, vocab=32_000, length=4096, batch=8),
        "llama_1b_8k": _run(TINY_LLAMA, vocab=32_000, length=8192, batch=4),
        "olmoe_4_layers": _run(experts, vocab=50_304, length=2048, batch=8),
        "llama_1b_32k": _run(replace(TINY_LLAMA, remat="full"), 32_000, length=32_768, batch=1),
    }
    policies = choices(get_type_hints(ModelConfig, include_extras=True)["remat"])
    for policy in policies:
        if policy != "none":
            model = replace(gpt2.model, remat=policy)  # type: ignore[arg-type]
            found[f"gpt2_124m_remat_{policy}"] = replace(gpt2, model=model)
    return found


ACCELERATOR_WORKLOADS = _accelerator_workloads()
WORKLOADS = {
    "small": _run(
        replace(GPT2, n_layers=6, n_heads=6, d_model=384), vocab=4096, length=256, batch=16
    ),
    "gpt2_124m": _run(GPT2_124M, vocab=50_304, length=512, batch=2),
    **ACCELERATOR_WORKLOADS,
}


def shrunk(run: RunConfig) -> RunConfig:
    """`run` in a size that any machine trains at once, for a smoke test."""
    heads = 2 if run.model.kv_heads < run.model.n_heads else 4
    model = replace(
        run.model,
        n_layers=2,
        d_model=64,
        n_heads=4,
        n_kv_heads=heads,
        head_dim=0,
        d_ff=128,
        window=min(run.model.window, 16),
        vocab_size=512,
        max_length=64,
    )
    return replace(
        run,
        model=model,
        data=replace(run.data, sequence_length=64, source_length=0),
        train=replace(run.train, batch_size=4),
    )


def torch_flags(run: RunConfig) -> list[str]:
    """The run's shape for torch_baseline.py."""
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


def make_words(seed: int, count: int) -> str:
    """`count` words of random letters, the same for the same seed."""
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefgh", k=rng.randint(2, 5))) for _ in range(count))


def words_file(folder: Path) -> str:
    """Writes 100 kB of sentences in paragraphs into a folder; the path."""
    paragraphs = (". ".join(make_words(100 * i + j, 10) for j in range(6)) for i in range(400))
    path = folder / "words.txt"
    path.write_text(".\n\n".join(paragraphs) + ".\n", encoding="utf-8")
    return str(path)
