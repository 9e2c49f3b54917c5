"""The harness gets from a model here what its own Hugging Face model gives it, on tasks made on the
spot."""

import json
import random
import shutil
import sys

import jax
import numpy as np
import pytest

from jaxformer.config.settings import with_settings

pytest.importorskip("lm_eval")
from harness import CHAT_TOKENS, END, LENGTH, answered, save, text, write_tasks
from products import slow_but

import jaxformer as jf
from jaxformer.checkpoints.digests import fingerprint
from jaxformer.checkpoints.reading import flat_leaves
from jaxformer.cli import main as jaxformer_main
from jaxformer.generation import refill as refill_file
from jaxformer.runs import harness as harness_file
from jaxformer.runs.harness import JaxformerLM, token_scores

pytestmark = pytest.mark.xdist_group("lm_eval")
one_directory = pytest.mark.parametrize("directory", ["gpt2"], indirect=True)


@pytest.fixture(scope="module", params=END)
def directory(request, tmp_path_factory):
    """A Hugging Face directory."""
    folder = tmp_path_factory.mktemp(request.param)
    save(request.param, folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder)
    return folder


@pytest.fixture(autouse=True, scope="module")
def offline(tmp_path_factory):
    """What the processes that are started here go by."""
    settings = {
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path_factory.mktemp("cache")),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        yield


def assert_equal(found, expected):
    """The same texts and choices, and log-likelihoods within 1e-4, or a few last places of a
    float32 sum of thousands."""
    for name in found[0]:
        for ours, hf in zip(found[0][name], expected[0][name], strict=True):
            compare(ours, hf, name)
        for metric, value in found[1][name].items():
            assert value == expected[1][name][metric] or value == pytest.approx(
                expected[1][name][metric], rel=1e-4
            ), name


def compare(ours, hf, name):
    if isinstance(hf, (list, tuple)):
        assert len(ours) == len(hf), name
        for pair in zip(ours, hf, strict=True):
            compare(*pair, name)
    elif isinstance(hf, float):
        assert type(ours) is float and ours == pytest.approx(hf, rel=5e-7, abs=1e-4), name
    else:
        assert ours == hf and type(ours) is type(hf), name


def reference_model(directory, **settings):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=3, **settings)


@pytest.fixture(scope="module")
def hf(directory):
    """The harness's own model of the directory."""
    return reference_model(directory)


@pytest.fixture(scope="module")
def expected(hf, tasks):
    """Its answers, where it scores no BOS after its own: each text that is read in windows begins
    with the prefix token once."""
    rolling, encode = hf.loglikelihood_rolling, hf.tok_encode

    def text_tokens(string, **settings):
        tokens = encode(string, **settings)
        return tokens[1:] if tokens[:1] == [hf.prefix_token_id] else tokens

    def rolling_without_a_second_bos(requests, **settings):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hf, "tok_encode", text_tokens)
            return rolling(requests, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "loglikelihood_rolling", rolling_without_a_second_bos)
        return answered(hf, tasks)


@pytest.mark.slow
def test_every_answer_equals_that_of_the_harness_s_own_hugging_face_model(
    directory, tasks, expected
):
    assert_equal(answered(JaxformerLM(directory, batch_size=3), tasks), expected)


def requests_of(kind, rows):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, row, 0) for row in rows]


def log_likelihood(lm, tokens, first):
    """The log-likelihood of `tokens` from the place `first` on, from one forward pass."""
    padded_row = np.array([tokens + [0] * (LENGTH - len(tokens))])
    logits = jf.forward(lm.params, lm.config, padded_row)
    chances = np.asarray(jax.nn.log_softmax(logits, axis=-1))[0]
    return float(sum(chances[place - 1, tokens[place]] for place in range(first, len(tokens))))


@pytest.mark.parametrize("bos", slow_but([None, True, False], True))
def test_a_text_read_in_windows_is_scored_without_the_tokens_before_it(directory, bos):
    """With a BOS of the template, of add_bos_token, or written in the text."""
    lm = JaxformerLM(directory, batch_size=2, add_bos_token=bos)
    begin = lm.prefix_token_id
    text_ids = lm.tokenizer.encode("the cat sees", special_tokens=False)
    shown = lm.tokenizer.shown(begin)
    texts = [("the cat sees",), (f"{shown}the cat sees",), (shown,), ("",)]
    plain, named, only_begin, empty = lm.loglikelihood_rolling(
        requests_of("loglikelihood_rolling", texts), disable_tqdm=True
    )
    assert plain == pytest.approx(log_likelihood(lm, [begin, *text_ids], 1), abs=1e-4)
    assert named == plain and (only_begin, empty) == (0.0, 0.0)


def test_a_continuation_without_tokens_is_refused_as_the_harness_refuses_it(directory, hf):
    lm = JaxformerLM(directory)
    for pair in (("the cat", ""), ("", ""), ("", lm.tokenizer.shown(lm.prefix_token_id))):
        asked = requests_of("loglikelihood", [("the cat", " dog"), pair])
        with pytest.raises((AssertionError, IndexError)):
            hf.loglikelihood(asked, disable_tqdm=True)
        with pytest.raises(jf.ConfigError) as raised:
            lm.loglikelihood(asked, disable_tqdm=True)
        assert f"the continuation {pair[1]!r} after the context {pair[0]!r}" in str(raised.value)
    with pytest.raises(jf.ConfigError, match="the continuation has no tokens"):
        lm._loglikelihood_tokens([(None, [5], [])])


@one_directory
def test_a_continuation_is_greedy_exactly_where_the_model_would_write_it(directory, hf):
    """Token by token: what transformers writes, the same with one token changed, all of them asked
    for together."""
    import torch

    ours, rng = JaxformerLM(directory, batch_size=4), random.Random(2)
    asked = []
    for length in (1, 7, 20, 60):
        context = [rng.randrange(2, 290) for _ in range(length)]
        settings = {
            "do_sample": False,
            "max_new_tokens": 24,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        written = hf.model.generate(torch.tensor([context]), **settings)[0, length:].tolist()
        for count, changed in ((24, None), (24, 0), (24, 10), (24, 23), (1, 0), (5, 4), (5, 4)):
            continuation = [
                t if i != changed else rng.randrange(290) for i, t in enumerate(written[:count])
            ]
            asked.append((None, context, continuation))
    asked.append((None, [5], [rng.randrange(290) for _ in range(LENGTH)]))
    found, expected = (
        model._loglikelihood_tokens(asked, disable_tqdm=True) for model in (ours, hf)
    )
    compare(found, expected, "tokens")
    assert {greedy for _, greedy in found} == {True, False}


@one_directory
def test_no_more_is_read_than_must_be(directory, monkeypatch):
    """Choices that differ in their last token are one row; rows of like length go together; few
    tokens are few logits."""
    read, lm = [], JaxformerLM(directory, batch_size=2)
    monkeypatch.setattr(
        harness_file,
        "token_scores",
        lambda *asked: read.append((asked[2], *asked[3][0].shape)) or token_scores(*asked),
    )
    asked = [(None, [5, 6, 7], [8, last]) for last in range(20)] + [(None, [5, 6, 7, 8], [9])]
    answers = lm._loglikelihood_tokens(asked, disable_tqdm=True)
    assert len({value for value, _ in answers}) == 21
    lm._loglikelihood_tokens(
        [(None, [5] * length, [6]) for length in (90, 1, 91, 2)], disable_tqdm=True
    )
    assert read == [(16, 2, 64), (0, 2, 96), (0, 2, 64)]


@pytest.mark.parametrize("bos", slow_but([None, True, False], None))
def test_texts_become_the_tokens_of_the_harness_s_own_model(directory, bos):
    ours, hf = (
        JaxformerLM(directory, add_bos_token=bos),
        reference_model(directory, add_bos_token=bos),
    )
    assert (ours.prefix_token_id, ours.eot_token_id) == (hf.prefix_token_id, hf.eot_token_id)
    assert (ours.max_length, ours.max_gen_toks) == (hf.max_length, hf.max_gen_toks)
    strings = ["", " ", "the cat ", "<s> the cat", "<s>", "<|endoftext|>x", "it's\tüber"]
    for string in [*strings, "a <|endoftext|> b </s>"]:
        for added in (None, True, False):
            assert ours.tok_encode(string, added) == hf.tok_encode(string, added), (string, added)


def test_a_text_without_a_context_follows_the_end_token_where_no_bos_is_named(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"bos_token": None}
    path.write_text(json.dumps(settings))
    ours, hf = JaxformerLM(tmp_path / "model"), reference_model(tmp_path / "model")
    assert ours.prefix_token_id == hf.prefix_token_id == hf.eot_token_id


def written(lm, contexts, **settings):
    """What a model writes after each context."""
    requests = requests_of("generate_until", [(context, settings) for context in contexts])
    return lm.generate_until(requests, disable_tqdm=True)


CONTEXTS = ["the cat", "dog", "river stone bright", "42 <b>"]


@one_directory
def test_writing_ends_where_a_text_has_its_stop_and_another_takes_its_row(directory, monkeypatch):
    chunks, advance = [], refill_file._advance
    monkeypatch.setattr(
        refill_file, "_advance", lambda *arguments: chunks.append(1) or advance(*arguments)
    )
    lm = JaxformerLM(directory, batch_size=2)
    whole = written(lm, CONTEXTS, until=[], max_gen_toks=80)
    # Four texts of up to 80 tokens in two rows, a chunk at a time.
    assert len(chunks) >= 80 / refill_file.CHUNK and max(map(len, whole)) > 40
    chunks.clear()
    stops = [text[3:6] for text in whole]
    assert written(lm, CONTEXTS, until=stops, max_gen_toks=80) == [
        min((text.split(stop)[0] for stop in stops if stop), key=len) for text in whole
    ]
    assert len(chunks) == 2
    chunks.clear()
    prompt = np.array([lm.tokenizer.encode(CONTEXTS[0])])
    read = prompt, np.ones_like(prompt)
    first = token_scores(lm.params, lm.config, 0, read, np.array([1]))[2].argmax()
    monkeypatch.setattr(type(lm.tokenizer), "end_token", int(first))
    assert written(lm, CONTEXTS[:1], until=[], max_gen_toks=80) == [""] and len(chunks) == 1


@pytest.mark.slow
@one_directory
def test_a_draw_from_one_token_is_greedy_and_one_from_all_follows_the_seed(directory):
    lm = JaxformerLM(directory, batch_size=4)
    greedy = written(lm, CONTEXTS, max_gen_toks=20)
    assert (
        written(lm, CONTEXTS, max_gen_toks=20, do_sample=True, top_k=1, temperature=0.7) == greedy
    )
    assert (
        written(lm, CONTEXTS, max_gen_toks=20, do_sample=False, temperature=0.7, num_beams=1)
        == greedy
    )
    assert written(lm, CONTEXTS, max_gen_toks=20, do_sample=True) != greedy
    penalized = {"max_gen_toks": 20, "repetition_penalty": 1.4, "no_repeat_ngram_size": 3}
    texts = written(lm, CONTEXTS, **penalized)
    assert texts != greedy and texts == written(reference_model(directory), CONTEXTS, **penalized)
    drawn = []
    for seed in (1, 1, 2):
        np.random.seed(seed)
        drawn.append(written(lm, CONTEXTS, max_gen_toks=20, do_sample=True, temperature=3.0))
    assert drawn[0] == drawn[1] != drawn[2]


@one_directory
def test_a_stop_that_is_the_name_of_a_special_token_is_that_token(directory):
    """The text lacks such names, so that it would never have the stop."""
    lm = JaxformerLM(directory, batch_size=2)
    name = lm.tokenizer.shown(lm.eot_token_id)
    for until in ([name], [f"\n{name}"], [name, "\n"]):
        texts, ends = lm.stops_of(until)
        assert texts == [name, *until[1:]] and ends == {lm.eot_token_id}
    assert lm.stops_of([None, ""]) == ([name], set())


@pytest.mark.slow
def test_an_encoder_decoder_answers_as_the_harness_s_own_model(tmp_path):
    """The source is the context; a continuation is what the decoder writes."""
    save("t5", tmp_path)
    ours, hf = JaxformerLM(tmp_path, batch_size=4), reference_model(tmp_path)
    rng = random.Random(5)
    assert (ours.backend, ours.max_length) == (hf.backend, hf.max_length) == ("seq2seq", LENGTH)
    pairs = [(text(rng, count), " " + text(rng, 1 + count // 3)) for count in (1, 4, 20, 90)]
    pairs += [("", "the cat"), ("the cat ", "sees"), ("the cat", " A"), ("the cat", " B")]
    asked = requests_of("loglikelihood", pairs)
    found, expected = (lm.loglikelihood(asked, disable_tqdm=True) for lm in (ours, hf))
    compare(found, expected, "loglikelihood")
    texts = requests_of("loglikelihood_rolling", [("the cat sees a dog",), (text(rng, 90),)])
    found, expected = (lm.loglikelihood_rolling(texts, disable_tqdm=True) for lm in (ours, hf))
    compare(found, expected, "rolling")
    settings = {"until": [" t"], "max_gen_toks": 20}
    # Theirs counts the source too, unless max_length says how many tokens the decoder has.
    assert written(ours, CONTEXTS, **settings) == written(hf, CONTEXTS, **settings, max_length=21)


def test_conversations_are_those_of_the_harness_s_own_model(tmp_path):
    """Few-shot examples as turns, a system message that the template refuses, and an answer whose
    beginning the task gives."""
    save("llama", tmp_path, chat=True)
    ours, hf = JaxformerLM(tmp_path, batch_size=4), reference_model(tmp_path)
    for turns in (
        [("user", "the cat ")],
        [("system", "be slow"), ("user", "dog"), ("assistant", " tree "), ("user", "a cat")],
        [("user", "dog"), ("assistant", "The tree is ")],
    ):
        messages = [{"role": role, "content": content} for role, content in turns]
        asked = turns[-1][0] == "user"
        rendered = ours.apply_chat_template(messages, add_generation_prompt=asked)
        assert rendered == hf.apply_chat_template(messages, add_generation_prompt=asked)
    assert ours.chat_template(True) == hf.chat_template(True)
    # An answer ends with the token that ends a turn, which is no end token of the tokenizer.
    turn, over = map(ours.tokenizer.id_of, CHAT_TOKENS)
    assert ours.stops_of([])[1] == {over}
    assert ours.stops_of(["<|turn|>", "a"]) == (["</s>", "a"], {turn, over})


def test_the_results_say_which_weights_answered(directory, tmp_path):
    lm = JaxformerLM(directory)
    info = lm.get_model_info()
    assert info["model_sha"] == fingerprint(flat_leaves(lm.params))
    assert (info["model_revision"], info["model_config"]["d_model"]) == ("", 32)
    assert jaxformer_main(["convert", str(directory), str(tmp_path / "run")]) == 0
    of_run = JaxformerLM(tmp_path / "run").get_model_info()
    assert of_run["model_revision"] == "step 0" and of_run["model_sha"] == info["model_sha"]
    lm.params["embed"]["tokens"] += 1
    assert lm.get_model_info()["model_sha"] != info["model_sha"]
    json.dumps(of_run)


def from_scratch(**settings):
    """A model as a run directory gives it: its tokenizer has an end token alone, and its table more
    rows than that."""
    from jaxformer.runs.loading import Loaded
    from jaxformer.tokenizer import train_bpe_tokenizer

    tokenizer = train_bpe_tokenizer([text(random.Random(0), 400)], 280)
    config = with_settings(
        jf.ModelConfig(),
        {"vocab_size": 320, "d_model": 32, "n_layers": 1, "n_heads": 2, "max_length": 80}
        | settings,
    )
    params = jax.tree.map(lambda leaf: 5 * leaf, jf.init(config, jax.random.key(0)))
    return Loaded(params, config, tokenizer)


def test_a_context_that_is_cut_is_told(monkeypatch, caplog):
    monkeypatch.setattr(harness_file, "load", lambda *_, **__: from_scratch())
    lm = JaxformerLM("run", batch_size=2)
    (whole, _), (cut, _) = lm._loglikelihood_tokens(
        [(None, [3] * 80, [5]), (None, [4] * 9 + [3] * 80, [5])]
    )
    assert (
        whole == cut
        and "1 of 2 contexts lose their beginning: there is room for 80 tokens" in caplog.text
    )
    assert (
        written(lm, ["cat " * 90], max_gen_toks=60)
        and "1 of 1 contexts" in caplog.text
        and "20 tokens" in caplog.text
    )


def test_logits_computed_a_few_at_a_time_give_the_same(monkeypatch):
    loaded, rng, found = from_scratch(), np.random.default_rng(0), []
    segments = (np.arange(64) >= 64 - np.array([[64], [30], [2]])).astype(np.int32)
    rows = ((rng.integers(0, 320, (3, 64)), segments), np.array([40, 17, 1]))
    for limit, shape in ((2**23, "[63,3,1,320]"), (3 * 320 * 4, "[4,3,1,320]")):
        monkeypatch.setattr(harness_file, "MAX_LOGITS", limit)
        token_scores.clear_cache()
        traced = token_scores.trace(loaded.params, loaded.config, 64, *rows)
        assert shape in str(traced.jaxpr) and (limit == 2**23) == (
            "[63,3,1,320]" in str(traced.jaxpr)
        )
        found.append(token_scores(loaded.params, loaded.config, 64, *rows))
    for few, many in zip(*found, strict=True):
        np.testing.assert_allclose(few, many, rtol=1e-5)


REFUSED = {
    "no path": (lambda: JaxformerLM(), "no path"),
    "an unknown argument": (lambda: JaxformerLM("run", pretrained="gpt2"), "holds pretrained"),
    "rows": (lambda: JaxformerLM("run", batch_size=0), "batch_size=0"),
    "length": (lambda: JaxformerLM("run", max_length=81), "from 1 to 80"),
    "dtype": (lambda: JaxformerLM("run", dtype="int8"), "int8"),
    "no room": (lambda: written(JaxformerLM("run"), ["a"], max_gen_toks=80), "max_gen_toks=80"),
    "beams": (
        lambda: written(JaxformerLM("run"), ["a"], num_beams=4, max_gen_toks=8),
        "hold num_beams",
    ),
    "no chat template": (
        lambda: JaxformerLM("run").apply_chat_template([{"role": "user", "content": "a"}]),
        "has no chat template",
    ),
    "a named chat template": (
        lambda: JaxformerLM("run").chat_template("rag"),
        "--apply_chat_template rag",
    ),
    "a stop that no text has": (
        lambda: written(JaxformerLM("run"), ["a"], until=["b<|endoftext|>"], max_gen_toks=8),
        "'b<|endoftext|>', which no text has",
    ),
    "a stop that is no text": (
        lambda: written(JaxformerLM("run"), ["a"], until=[5], max_gen_toks=8),
        "until has 5",
    ),
    "too long": (
        lambda: JaxformerLM("run")._loglikelihood_tokens([(None, [1], [2] * 81)]),
        "81 tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_said_in_one_message(monkeypatch, name):
    monkeypatch.setattr(harness_file, "load", lambda *_, **__: from_scratch())
    attempt, message = REFUSED[name]
    with pytest.raises(jf.ConfigError, match=message):
        attempt()


@pytest.mark.parametrize(
    "settings", [{"family": "encoder"}, {"head.kind": "tags", "head.n_classes": 3}]
)
def test_a_model_that_writes_no_text_from_left_to_right_is_refused(monkeypatch, settings):
    monkeypatch.setattr(harness_file, "load", lambda *_, **__: from_scratch(**settings))
    with pytest.raises(jf.ConfigError, match="give it a decoder"):
        JaxformerLM("run")


@pytest.mark.slow
@one_directory
def test_the_command_evaluates_a_directory(directory, tasks, expected, tmp_path):
    line = ["lm_eval", "--model", "jaxformer", "--model_args", f"path={directory}"]
    line += ["--tasks", "tiny_choices", "--batch_size", "4"]
    line += ["--include_path", str(tasks), "--output_path", str(tmp_path)]
    assert jaxformer_main(line) == 0
    (report,) = tmp_path.rglob("results_*.json")
    results = json.loads(report.read_text())["results"]["tiny_choices"]
    for metric, value in expected[1]["tiny_choices"].items():
        assert isinstance(value, str) or results[metric] == value or "stderr" in metric


def test_the_command_says_a_mistake_in_one_message(monkeypatch, capsys):
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: JaxformerLM("/nowhere"))
    assert jaxformer_main(["lm_eval"]) == 2
    assert capsys.readouterr().err.startswith("error: /nowhere has no config.json")


def test_without_the_harness_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert jaxformer_main(["lm_eval"]) == 2
    said = capsys.readouterr()
    assert 'pip install "jaxformer[lm_eval]"' in said.err and len(said.err.splitlines()) == 1
