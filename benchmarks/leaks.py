"""What one document of a packed row changes in the next one: to docs/leaks.png and the README.

    python benchmarks/leaks.py

Two documents stand in one row. The tokens of the first one are replaced, and the logits of the
second one, which should not move, are compared: the largest difference, in standard deviations of
the logits. The same weights, drawn at random, are computed by jaxformer with segment ids, and by
transformers with position ids that restart, which its documentation gives for packed rows: as it is
called without more, and without a cache, as a trainer that cares calls it.
"""

import argparse
import inspect
import json
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import transformers
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox
from pairing import HERE, add_smoke, print_table, save

import jaxformer as jf
from jaxformer.report.plot import BLUE, INK, RED, STYLE

LENGTH = 24  # tokens of a document
TOKENS = 256
WAYS = ("jaxformer", "transformers, no cache", "transformers, as called")
LLAMA = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
GPT2 = {"vocab_size": TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
BLOOM = {"vocab_size": TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4}
OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32}
# A model, its class in transformers without its ending, and its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama: RoPE": ("LlamaForCausalLM", LLAMA),
    "Mistral: RoPE, window": ("MistralForCausalLM", LLAMA | {"sliding_window": 8}),
    "Gemma 2: window, soft cap": ("Gemma2ForCausalLM", LLAMA | {"sliding_window": 8}),
    "GPT-2: learned positions": ("GPT2LMHeadModel", GPT2),
    "BLOOM: ALiBi": ("BloomForCausalLM", BLOOM),
    "OPT: learned positions": ("OPTForCausalLM", LLAMA | OPT),
    "BERT: encoder": ("BertForMaskedLM", LLAMA),
    "ModernBERT: encoder, window": ("ModernBertForMaskedLM", LLAMA | {"local_attention": 8}),
}


def made(name: str) -> Any:
    """A model of transformers with random weights, large enough for attention to matter."""
    class_name, settings = MODELS[name]
    kind = getattr(transformers, class_name)
    config = kind.config_class(**settings, pad_token_id=0)
    torch.manual_seed(0)
    model = kind(config).eval()
    model.set_attn_implementation("eager")
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def leak(logits: Callable[[np.ndarray], np.ndarray]) -> float:
    """How far the logits [T, V] of a row move in its second document with the first one's
    tokens."""
    numbers = np.random.default_rng(0)
    first, other, second = numbers.integers(3, TOKENS, (3, LENGTH))
    here = logits(np.concatenate([first, second])[None])[LENGTH:]
    there = logits(np.concatenate([other, second])[None])[LENGTH:]
    return float(np.abs(here - there).max() / here.std())


def measured(name: str) -> dict[str, float]:
    """The leak of a model by each way to compute it."""
    model = made(name)
    takes = inspect.signature(model.forward).parameters
    # [1, 2 T]: each document begins anew.
    positions = torch.arange(2 * LENGTH)[None] % LENGTH
    segments = np.arange(2 * LENGTH)[None] // LENGTH + 1
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = jf.load(folder)

    def ours(tokens: np.ndarray) -> np.ndarray:
        return np.asarray(jf.forward(loaded.params, loaded.config, tokens, segment_ids=segments)[0])

    def theirs(**options: Any) -> Callable[[np.ndarray], np.ndarray]:
        taken = {key: value for key, value in options.items() if key in takes}

        def logits(tokens: np.ndarray) -> np.ndarray:
            with torch.no_grad():
                found = model(input_ids=torch.tensor(tokens), **taken).logits[0]
            return np.asarray(found)

        return logits

    without_cache = theirs(position_ids=positions, use_cache=False)
    return dict(
        zip(WAYS, map(leak, (ours, without_cache, theirs(position_ids=positions))), strict=True)
    )


def draw(rows: dict[str, dict[str, float]], path: Path) -> None:
    """A table of cells: blue where nothing moves, red where the other document is read."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 0.27 * len(rows) + 1.2), dpi=300, facecolor="white")
        axes = figure.subplots()
        axes.set_axis_off()
        cells = axes.table(
            [[f"{row[way]:.1f}" for way in WAYS] for row in rows.values()],
            rowLabels=[*rows],
            colLabels=[way.replace(", ", ",\n") for way in WAYS],
            cellColours=[[BLUE if row[way] == 0 else RED for way in WAYS] for row in rows.values()],
            cellLoc="center",
            bbox=Bbox.unit(),
        )
        for (number, column), cell in cells.get_celld().items():
            cell.set_edgecolor("white")
            is_value = number > 0 and column >= 0
            cell.get_text().set_color("white" if is_value else INK)
        figure.suptitle(
            "What one document of a packed row moves in the next one,\n"
            "in standard deviations of the logits",
            color=INK,
            fontsize=10,
        )
        figure.tight_layout()
        figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_smoke(parser)
    options = parser.parse_args()
    names = [*MODELS][:1] if options.smoke else [*MODELS]
    rows = {name: measured(name) for name in names}
    print_table(("model", *WAYS), [(name, *map(str, row.values())) for name, row in rows.items()])
    packages = {name: version(name) for name in ("jax", "torch", "transformers")}
    print(json.dumps(packages))
    save("leaks", {"versions": packages, "leaks": rows}, options.smoke)
    if not options.smoke:
        draw(rows, HERE.parent / "docs" / "leaks.png")


if __name__ == "__main__":
    main()
