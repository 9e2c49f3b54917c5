"""A GGUF file is the model that transformers reads from it, by tensors and by tokens; what
is not read is refused by name."""

import math
import mmap
import struct
import sys
import time
import tracemalloc

import numpy as np
import pytest
import transformers as tf
from pretrained import assert_close, logits, our_logits
from products import slow_but
from tiny_run import ROOT, write_text

import jaxformer as jf
from jaxformer.cli import main

gguf = pytest.importorskip("gguf")  # of an extra

from gguf_models import tiny, written  # noqa: E402
from pretrained_tokenizers import HARD  # noqa: E402

from jaxformer.interop.gguf_files import GGUF_TYPES, GgufFiles, GgufHead  # noqa: E402
from jaxformer.report import read_metrics  # noqa: E402
from jaxformer.tokenizer import Tokenizer  # noqa: E402
from jaxformer.tokenizer.pieces import BYTES  # noqa: E402

pytestmark = pytest.mark.xdist_group("gguf")
GEMMA = dict(
    head_dim=256, num_attention_heads=2, num_key_value_heads=1, sliding_window=5, hidden_size=128
)
# The settings of transformers' model, and metadata.
MODELS = {
    "llama": (tf.LlamaForCausalLM, {}),
    "llama, tied": (tf.LlamaForCausalLM, dict(tie_word_embeddings=True, num_key_value_heads=1)),
    "qwen2": (tf.Qwen2ForCausalLM, dict(rope_parameters=dict(rope_theta=523.0))),
    "qwen3": (tf.Qwen3ForCausalLM, dict(head_dim=128)),
    "gemma2": (tf.Gemma2ForCausalLM, GEMMA),
    "gemma3": (tf.Gemma3ForCausalLM, GEMMA | dict(num_hidden_layers=6)),
}


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    mask = np.ones((2, 12), int)
    mask[1, -4:] = 0
    return {"input_ids": rng.integers(5, 250, mask.shape), "attention_mask": mask}


def theirs(path):
    """transformers' reading of a file, and its tokenizer."""
    model = tf.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype="float32", attn_implementation="eager"
    )
    return model.eval(), tf.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def made(name):
    architecture, settings = MODELS[name]
    kind = tf.Gemma3TextConfig if name == "gemma3" else architecture.config_class
    architecture.config_class = kind
    return tiny(architecture, seed=len(name), **settings)


@pytest.mark.parametrize("name", slow_but(MODELS, "llama, tied", "gemma3"))
def test_logits_are_those_of_the_model_that_was_written_and_of_transformers_reading(name, tmp_path):
    model = made(name)
    kind = "llama" if name in ("gemma2", "gemma3", "llama, tied") else "gpt2"
    path = written(tmp_path / "m.gguf", name.partition(",")[0], model, tokenizer=kind)
    loaded, (reading, tokenizer), batch = jf.load(path), theirs(path), inputs()
    found = our_logits(loaded, batch)
    assert_close(found, logits(reading, batch), batch)
    assert_close(found, logits(model, batch), batch)
    for text in HARD:
        assert loaded.tokenizer.encode(text, special_tokens=True) == tokenizer.encode(text), text


def test_gemma_1_which_transformers_does_not_read_from_gguf_is_the_model_that_was_written(tmp_path):
    sizes = {name: value for name, value in GEMMA.items() if name != "sliding_window"}
    model, paths = tiny(tf.GemmaForCausalLM, seed=3, **sizes), []
    for name, architecture in (("gemma", model), ("gemma2", made("gemma2"))):
        path = written(tmp_path / f"{name}.gguf", name, architecture, tokenizer="llama")
        paths.append(path)
    loaded, batch = jf.load(paths[0]), inputs()
    assert_close(our_logits(loaded, batch), logits(model, batch), batch)
    # Both have the tokenizer of their family.
    gemma_2 = jf.load(paths[1]).tokenizer
    for text in HARD:
        ids = gemma_2.encode(text, special_tokens=True)
        assert loaded.tokenizer.encode(text, special_tokens=True) == ids, text


def test_every_type_is_dequantized_as_by_transformers_whichever_rows_are_read(tmp_path):
    model = made("llama")
    names = [
        f"blk.{layer}.{stem}.weight"
        for layer in (0, 1)
        for stem in (
            *("attn_q", "attn_k", "attn_v", "attn_output"),
            *("ffn_gate", "ffn_up", "ffn_down"),
        )
    ]
    types = dict(zip(["token_embd.weight", *names], GGUF_TYPES, strict=True))
    path = written(tmp_path / "m.gguf", "llama", model, types)
    reading, _ = theirs(path)
    files, expected = GgufFiles(path), reading.state_dict()
    assert files.entries.keys() == expected.keys()
    for name, entry in files.entries.items():
        array = files.read(name)
        np.testing.assert_array_equal(array, expected[name].numpy(), strict=True)
        assert entry.shape == array.shape
        for rows in (slice(3, 9), slice(0, 0), slice(100, None)):
            np.testing.assert_array_equal(files.read(name, rows), array[rows], strict=True)


@pytest.mark.parametrize("pre", slow_but(["gpt-2", "llama-bpe", "qwen2", "tekken"], "tekken"))
def test_words_are_those_of_transformers(pre, tmp_path):
    path = written(tmp_path / "m.gguf", "qwen2", made("qwen2"), pre=pre)
    tokenizer = tf.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = jf.load(path).tokenizer
    assert ours.decode(ours.encode("Grüße 12345 \n x")) == "Grüße 12345 \n x"
    for text in HARD:
        assert ours.encode(text, special_tokens=True) == tokenizer.encode(text), text


def test_each_digit_is_a_word_where_llama_cpp_makes_it_one(tmp_path):
    ours = jf.load(written(tmp_path / "m.gguf", "qwen2", made("qwen2"), pre="smollm")).tokenizer
    assert [ours.shown(token) for token in ours.encode("12345")] == [*"12345"]


LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
SCALED = {
    "linear": dict(rope_type="linear", rope_theta=500.0, factor=4.0),
    "yarn": dict(
        rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=16
    ),
}


@pytest.mark.parametrize("kind", SCALED)
def test_scalings_of_rope_are_those_of_the_model_that_was_written(kind, tmp_path):
    model = tiny(tf.LlamaForCausalLM, rope_parameters=SCALED[kind])
    metadata = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    if kind == "yarn":
        metadata["llama.rope.scaling.original_context_length"] = 16
    path = written(tmp_path / "m.gguf", "llama", model, metadata=metadata)
    assert_close(our_logits(jf.load(path), inputs()), logits(model, inputs()), inputs())


@pytest.mark.parametrize("changed", [False, True])
def test_the_factors_of_llama_3_are_its_scaling_and_others_are_refused(changed, tmp_path):
    parameters = LLAMA3 | dict(rope_theta=500_000.0)
    model = tiny(tf.LlamaForCausalLM, rope_parameters=parameters)
    frequencies = 500_000.0 ** -(np.arange(0, 64, 2) / 64)
    factors = (frequencies / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() == pytest.approx(8)
    model.rope_factors = factors * (1 + changed * np.arange(32, dtype=np.float32))
    path = written(tmp_path / "m.gguf", "llama", model)
    if changed:
        with pytest.raises(jf.ConfigError, match=r"rope_freqs\.weight of another scaling"):
            jf.load(path)
        return
    loaded = jf.load(path)
    assert loaded.config.rope.scaling == "llama3" and loaded.config.rope.factor == 8
    assert_close(our_logits(loaded, inputs()), logits(model, inputs()), inputs())


def test_a_file_is_converted_to_a_directory_that_transformers_and_commands_read(tmp_path, capsys):
    sampling = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    types = {"token_embd.weight": "Q8_0"}
    model = made("llama, tied")
    path = written(tmp_path / "m.gguf", "llama", model, types, metadata=sampling)
    assert main(["convert", str(path), str(tmp_path / "out"), "--verify"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    (tmp_path / "any file").touch()  # has the mode that the umask gives
    files = [*(tmp_path / "out").iterdir(), tmp_path / "any file"]
    assert len({file.stat().st_mode for file in files}) == 1
    ours, tokenizer = jf.load(path).tokenizer, tf.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in HARD:
        assert ours.encode(text, special_tokens=True) == tokenizer.encode(text), text
    texts = []
    for place, file in {path: "m.gguf", tmp_path / "out": "generation_config.json"}.items():
        arguments = ["--prompt", "The quick", "--max_new_tokens", "8", "--seed", "0"]
        assert main(["sample", str(place), *arguments]) == 0
        captured = capsys.readouterr()
        assert captured.err == f"temperature 0.6, top_k 20: {file}\n"
        texts.append(captured.out)
    assert texts[0] == texts[1]


REFUSED = {
    "architecture": (dict(architecture="exaone"), "general.architecture='exaone'; those that are"),
    "experts": (dict(metadata={"llama.expert_count": 8}), r"llama\.expert_count=8"),
    "scaling": (dict(metadata={"llama.rope.scaling.type": "su"}), "RoPE is scaled by su"),
    "type": (dict(types={"blk.0.ffn_up.weight": "TQ2_0"}), r"blk\.0\.ffn_up\.weight of type TQ2_0"),
    "words": (dict(pre="strange"), r"tokenizer\.ggml\.pre='strange'"),
    "split": (dict(metadata={"split.count": 2}), "one of 2 files of a model"),
    "a text for a width": (dict(changed={"llama.embedding_length": "text"}), ""),
    "a text for heads": (dict(changed={"llama.attention.head_count": "text"}), ""),
    "a text for layers": (dict(changed={"llama.block_count": "text"}), ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_name(case, tmp_path):
    changes, message = REFUSED[case]
    path = written(
        tmp_path / "m.gguf", **{"architecture": "llama", "model": made("llama")} | changes
    )
    with pytest.raises(jf.ConfigError, match=message) as error:
        jf.load(path)
    assert "m.gguf" in str(error.value)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(jf.ConfigError, match=r"pip install 'jaxformer\[gguf\]'"):
        jf.load(tmp_path / "m.gguf")


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_run_begins_from_a_file_and_is_continued_as_from_its_directory(adapter, tmp_path, capsys):
    path = written(tmp_path / "m.gguf", "llama", made("llama"))
    folder, text = tmp_path / "directory", write_text(tmp_path / "text.txt", 30)
    assert main(["convert", str(path), str(folder)]) == 0
    settings = ["--data.train", text, "--data.sequence_length", 16, "--adapter.kind", adapter]
    settings += ["--train.batch_size", 2, "--data.cache_dir", tmp_path / "cache"]
    settings += ["--optimizer.warmup_steps", 1]
    losses, evaluated = [], []
    for origin in (folder, path):
        run_dir = tmp_path / f"run-{origin.name}"
        arguments = [*settings, "--run.init_from", origin, "--run.dir", run_dir]
        for steps in (2, 4):
            line = [*arguments, "--train.steps", steps, "--optimizer.decay_steps", 4]
            assert main(["train", str(ROOT / "configs/finetune.py"), *map(str, line)]) == 0
        losses.append([entry["loss"] for entry in read_metrics(run_dir) if "loss" in entry])
        capsys.readouterr()
        assert main(["evaluate", str(origin), "--data.validation", str(text)]) == 0
        evaluated.append(capsys.readouterr().out.split("val_loss")[-1])
        assert jf.load(run_dir).tokenizer.encode("cat") == jf.load(path).tokenizer.encode("cat")
    assert losses[0] == losses[1] and evaluated[0] == evaluated[1]


@pytest.mark.slow
def test_a_file_teaches_as_its_directory(tmp_path):
    path = written(tmp_path / "m.gguf", "llama", made("llama"))
    folder, text = tmp_path / "directory", write_text(tmp_path / "text.txt", 30)
    assert main(["convert", str(path), str(folder)]) == 0
    settings = [ROOT / "configs/finetune.py", "--run.init_from", folder, "--data.train", text]
    settings += ["--data.sequence_length", 16, "--train.batch_size", 2, "--train.steps", 2]
    settings += ["--data.cache_dir", tmp_path / "cache", "--optimizer.warmup_steps", 1]
    # Of another temperature than its teacher, which is the model that it starts from.
    settings += ["--distill.temperature", 2, "--distill.share", 0.25]
    logs = []
    for teacher in (path, folder):
        run_dir = tmp_path / f"run-{teacher.name}"
        line = ["train", *settings, "--distill.teacher", teacher, "--run.dir", run_dir]
        assert main([*map(str, line)]) == 0
        logs.append([entry["kl"] for entry in read_metrics(run_dir) if "kl" in entry])
    assert logs[0] == logs[1] and logs[0][0] == pytest.approx(0, abs=1e-6) and logs[0][-1] > 1e-6


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "tekken", "gpt-2", "qwen2", "smollm"])
def test_a_word_that_is_a_token_is_one_where_llama_cpp_ignores_its_merges(pre):
    tokens = [*BYTES, "ab", "abc", "Ġab"]
    tokenizer = Tokenizer.of_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.eos_token_id": 0,
            "tokenizer.ggml.bos_token_id": 1,
        },
        "a file",
    )
    ignores = pre in ("llama-bpe", "llama3", "tekken")
    assert tokenizer.prefix == [1] * ignores  # its add_bos, where the file does not say it
    found = [tokenizer.shown(token) for token in tokenizer.encode("abc ab abca")]
    whole = [*("abc", " ab"), *(" ", "ab", "c", "a")]
    merged = [*("ab", "c"), *(" ", "ab"), *(" ", "ab", "c", "a")]
    assert found == (whole if ignores else merged)


def header(*values: tuple[str, bytes]) -> bytes:
    """A GGUF file without tensors: metadata by their names, each its type and its bytes."""
    pairs = [struct.pack("<Q", len(name)) + name.encode() + value for name, value in values]
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs)


def array_of(kind: int, length: int, content: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, kind, length) + content


@pytest.mark.parametrize(
    "content",
    [
        header(("x", array_of(4, 2**60))),
        header(("x", array_of(4, 10**6))),
        header(("x", array_of(9, 1, array_of(4, 1, b"1234")[4:]))),
        header(("x", struct.pack("<IQ", 8, 2**62))),
        header()[:20],
        b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60),
    ],
)
def test_a_file_that_states_more_than_it_holds_is_refused_at_once(content, tmp_path):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(jf.ConfigError, match=r"m\.gguf is not a valid GGUF file"):
        jf.load(tmp_path / "m.gguf")


def test_a_vocabulary_is_read_at_once(tmp_path):
    words = b"".join(struct.pack("<Q3s", 3, b"abc") for _ in range(200_000))
    content = header(("x", array_of(8, 200_000, words)), ("y", array_of(6, 2, bytes(8))))
    (tmp_path / "m.gguf").write_bytes(content)
    before = time.process_time()
    with (tmp_path / "m.gguf").open("rb") as file:
        head = GgufHead(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    assert time.process_time() - before < 2  # the package's reader takes about 8 s
    assert head.metadata == {"x": ["abc"] * 200_000, "y": [0.0, 0.0]}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model": ["gpt2"]}, "its tokenizer cannot be read"),
        ({"tokens": [["a"]]}, "its tokenizer cannot be read"),
        ({"eos_token_id": -1}, r"eos_token_id=-1, which is none of its 256 tokens"),
        ({"eot_token_id": 256}, r"eot_token_id=256, which is none of its 256 tokens"),
        ({"bos_token_id": "a"}, r"bos_token_id=a, which is none of its 256 tokens"),
        ({"token_type": [1]}, "its tokenizer cannot be read"),
        ({"pre": None}, r"tokenizer\.ggml\.pre=None; those that are read"),
        ({"token_type": ["3"] * 256}, "its tokenizer cannot be read"),
        ({"model": "llama", "scores": ["1"] * 256}, "its tokenizer cannot be read"),
        ({"model": "llama", "scores": [math.nan] * 256}, "no score for each token"),
        ({"merges": [3]}, "its tokenizer cannot be read"),
    ],
)
def test_metadata_of_a_tokenizer_of_a_wrong_type_are_one_message(change, said):
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": [*BYTES], "merges": ["a b"]} | change
    with pytest.raises(jf.ConfigError, match=f"a file.*{said}"):
        metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
        Tokenizer.of_gguf(metadata, "a file")


def test_a_file_that_was_cut_or_whose_tensor_is_not_among_the_tensors_is_refused(tmp_path):
    path = written(tmp_path / "m.gguf", "qwen2", made("qwen2"))
    name, content = b"output_norm.weight", path.read_bytes()
    # A name is followed by the number of axes, 1, the size of it, the type and the offset.
    at = content.index(name) + len(name) + 4 + 8 + 4
    damaged = [content[:size] for size in (0, 3, 100, 20_000, -1000)]
    for offset in (2**64 - 32, 7, 2**40):
        damaged.append(content[:at] + struct.pack("<Q", offset) + content[at + 8 :])
    for bad in damaged:
        path.write_bytes(bad)
        with pytest.raises(jf.ConfigError, match=r"m\.gguf is not a valid GGUF file"):
            jf.load(path)


def test_a_long_token_costs_no_memory():
    values = {"model": "llama", "tokens": ["<unk>", "a", "a" * 60_000], "scores": [0.0, -1.0, -2.0]}
    values = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    tracemalloc.start()
    Tokenizer.of_gguf(values | {"general.architecture": "llama"}, "a file")
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
