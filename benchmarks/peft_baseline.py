"""The side of transformers and peft of benchmarks/finetune.py: a worker that trains a LoRA adapter
of a model directory in float32 on random tokens.
"""

import argparse
import ctypes
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from serving import serve


class Trainer:
    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(options.threads)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.float32
        )
        self.base_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        lora = peft.LoraConfig(
            r=options.rank,
            lora_alpha=2 * options.rank,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            task_type="CAUSAL_LM",
        )
        self.model: Any = peft.get_peft_model(model, lora)
        self.model.train()
        learned = [p for p in self.model.parameters() if p.requires_grad]
        self.learned = sum(p.numel() for p in learned)
        self.optimizer = torch.optim.AdamW(learned, lr=1e-4)
        rng = np.random.default_rng(0)
        rows = rng.integers(0, model.config.vocab_size, (options.batch, options.length + 1))
        tokens = torch.from_numpy(rows.astype(np.int64))
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:]
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # as in our worker
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def step(self) -> dict[str, Any]:
        begin = time.perf_counter()
        logits = self.model(input_ids=self.inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), self.targets.flatten()
        )
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        value = float(loss)
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
        return {
            "seconds": time.perf_counter() - begin,
            "loss": value,
            "above_base": peak - self.base_bytes,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    trainer = Trainer(parser.parse_args())
    packages = ("torch", "transformers", "peft")
    about = {
        "versions": {name: version(name) for name in packages},
        "base_bytes": trainer.base_bytes,
        "learned": trainer.learned,
    }
    serve(about, {"step": trainer.step})


if __name__ == "__main__":
    main()
