"""The configs are the models they are named after."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxformer.config_file import read_config
from jaxformer.models.cost import parameter_count
from jaxformer.optim import make_schedule

CONFIGS = Path(__file__).parent.parent / "configs"
PUBLISHED = {  # what Hugging Face counts in BertForPreTraining, T5ForConditionalGeneration, GPT2LMHeadModel of these sizes
    "bert_base": 110_106_428,
    "t5_small": 60_506_624,
    "gpt2_124m": 124_439_808 + 47 * 768,  # the table padded to a multiple of 128
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_has_as_many_parameters_as_the_published_model(name):
    config = read_config(CONFIGS / f"{name}.py")
    size = config.model.vocab_size or config.tokenizer.vocab_size
    assert parameter_count(dataclasses.replace(config.model, vocab_size=size)) == PUBLISHED[name]


def test_the_base_transformers_learning_rate_is_the_papers():
    """d_model^-0.5 min(step^-0.5, step warmup^-1.5) (arXiv:1706.03762), counted from step 1."""
    config = read_config(CONFIGS / "transformer_base.py")
    schedule, warmup = make_schedule(config.optimizer, config.train.steps), config.optimizer.warmup_steps
    for step in (1, 1000, 3999, 4000, 8000, 100_000):
        expected = config.model.d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
        np.testing.assert_allclose(float(schedule(step - 1)), expected, rtol=1e-3)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_every_config_in_a_file_is_one(path):
    from jaxformer.config import RunConfig

    named = [line.partition(" = ")[0] for line in path.read_text().splitlines() if " = replace(" in line and line[0] != " "]
    for name in named:
        assert isinstance(read_config(f"{path}:{name}"), RunConfig)
