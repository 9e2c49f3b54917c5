"""SmolLM2-135M-Instruct learns chats in its own template by LoRA over NF4 weights, and what it
became is read by transformers: the recipe of docs/finetuning.md in a few steps."""

import json
import runpy
from pathlib import Path

import numpy as np
import torch
import transformers as tf
from smollm2 import HOME, MARKS, converted

import jaxformer as jf
from jaxformer import data
from jaxformer.cli import main
from jaxformer.runs.evaluation import make_evaluation
from jaxformer.runs.model_files import ModelFiles
from jaxformer.runs.objectives import task_of

pytestmark = MARKS
ROOT = Path(__file__).parents[2]
LEARNED, HELD_OUT = 48, 8  # conversations
SETTINGS = """
--data.objective sft --data.messages_field messages --data.sequence_length 128
--train.batch_size 2 --train.steps 6 --optimizer.learning_rate 2e-3 --optimizer.warmup_steps 1
--adapter.kind lora --adapter.rank 8 --adapter.alpha 16 --adapter.targets attention,ffn
--adapter.base nf4 --model.layer_loop scan --run.sample_tokens 0
"""


def conversations() -> dict[str, str]:
    """Files of the settings data.train and data.validation, as examples/stdlib_answers.py makes
    them."""
    example = runpy.run_path(str(ROOT / "examples/stdlib_answers.py"))
    files = {}
    for name, count in (("train", LEARNED), ("validation", HELD_OUT)):
        records = [
            json.dumps(record)
            for module, path in example["modules"]().items()
            if example["held_out"](module) == (name == "validation")
            for record in example["questions"](module, path)
        ]
        files[name] = Path(HOME.name, f"{name}.jsonl")
        files[name].write_text("\n".join(records[:count]), encoding="utf-8")
    return {f"--data.{name}": str(file) for name, file in files.items()}


def trained() -> Path:
    """The directory of a run."""
    target = Path(HOME.name, "qlora")
    arguments = {
        "--run.init_from": str(converted()),
        "--run.dir": str(target),
        "--data.cache_dir": HOME.name,
        **conversations(),
    }
    stated = [word for setting in arguments.items() for word in setting]
    assert main(["train", str(ROOT / "configs/finetune.py"), *stated, *SETTINGS.split()]) == 0
    return target


def test_chats_are_learned_and_the_merged_model_is_that_of_transformers():
    path = trained()
    model, run = jf.load(path), ModelFiles(path).run
    task = task_of(run.model, run.data)
    corpus = data.prepare(run.data, run.tokenizer, task, seed=run.run.seed)
    batches = list(data.evaluation_batches(corpus.validation, run.data, 2))
    evaluate = make_evaluation("sft", model.config)
    before = evaluate(jf.without_adapters(model.params), batches)["val_loss"]
    after = evaluate(model.params, batches)["val_loss"]
    print(f"held-out loss: {before:.4f} before, {after:.4f} after")
    assert after < before - 0.5

    merged = Path(HOME.name, "merged")
    assert main(["convert", str(path), str(merged), "--merge"]) == 0
    theirs = tf.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    # Without the padding at the end of the rows, whose logits no text has.
    tokens = np.asarray(batches[0]["tokens"])[:, :64]
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    logits = np.asarray(jf.forward(model.params, model.config, tokens))
    difference = np.abs(logits - expected).max() / expected.std()
    print(f"largest difference of a logit: {difference:.2g} of their deviation")
    assert difference < 2e-4
