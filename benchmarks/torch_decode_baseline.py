"""The transformers side of the decoding comparison: a worker around GPT2LMHeadModel.generate with
its default cache."""

import argparse
import time
from typing import Any

import numpy as np
import torch
import transformers
from serving import serve


def load(model: Any, path: str) -> None:
    """jaxformer's GPT-2 into transformers' names; both store linear weights [in, out]."""
    file = np.load(path)
    d = model.config.n_embd

    def merged(i: int, suffix: str, rows: tuple[int, ...]) -> np.ndarray:
        return np.concatenate(
            [file[f"blocks.attention.{name}{suffix}"][i].reshape(*rows, d) for name in "qkv"],
            axis=-1,
        )

    state = {
        "wte.weight": file["embed.tokens"],
        "wpe.weight": file["embed.positions"],
        "ln_f.weight": file["final_norm.scale"],
        "ln_f.bias": file["final_norm.bias"],
    }
    for i in range(model.config.n_layer):
        state |= {
            f"h.{i}.ln_1.weight": file["blocks.attention_norm.scale"][i],
            f"h.{i}.ln_1.bias": file["blocks.attention_norm.bias"][i],
            f"h.{i}.ln_2.weight": file["blocks.ffn_norm.scale"][i],
            f"h.{i}.ln_2.bias": file["blocks.ffn_norm.bias"][i],
            f"h.{i}.attn.c_attn.weight": merged(i, "", (d,)),
            f"h.{i}.attn.c_attn.bias": merged(i, "_bias", ()),
            f"h.{i}.attn.c_proj.weight": file["blocks.attention.out"][i].reshape(d, d),
            f"h.{i}.attn.c_proj.bias": file["blocks.attention.out_bias"][i],
            f"h.{i}.mlp.c_fc.weight": file["blocks.ffn.up"][i],
            f"h.{i}.mlp.c_fc.bias": file["blocks.ffn.up_bias"][i],
            f"h.{i}.mlp.c_proj.weight": file["blocks.ffn.down"][i],
            f"h.{i}.mlp.c_proj.bias": file["blocks.ffn.down_bias"][i],
        }
    tensors = {
        f"transformer.{name}": torch.from_numpy(np.ascontiguousarray(value))
        for name, value in state.items()
    }
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"weights do not fit: missing {missing}, unexpected {unexpected}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("layers", "d_model", "heads", "vocab", "length", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--prompt", required=True, help="token numbers, comma-separated")
    parser.add_argument("--weights", required=True, help=".npz of the values")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = {"n_layer": options.layers, "n_embd": options.d_model, "n_head": options.heads}
    config = transformers.GPT2Config(vocab_size=options.vocab, n_positions=options.length, **shape)
    model = transformers.GPT2LMHeadModel(config).eval()
    load(model, options.weights)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompt = torch.tensor([[int(token) for token in options.prompt.split(",")]])
    big = torch.ones(2**26)

    def generate(number: str) -> dict[str, Any]:
        begin = time.perf_counter()
        with torch.inference_mode():
            mask = torch.ones_like(prompt)
            made = model.generate(
                prompt, attention_mask=mask, max_new_tokens=int(number), do_sample=False
            )
        new = made[0, prompt.shape[1] :].tolist()
        return {"seconds": time.perf_counter() - begin, "tokens": new}

    def read() -> dict[str, Any]:
        begin = time.perf_counter()
        big.sum()
        return {"bytes_per_second": 4 * big.numel() / (time.perf_counter() - begin)}

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    serve({"versions": versions}, {"generate": generate, "read": read})


if __name__ == "__main__":
    main()
