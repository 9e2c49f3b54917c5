"""A tokenizer from a Hugging Face directory: ids, text and the roles of special tokens are those of
transformers."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import transformers
from pretrained_tokenizers import MODELS, TEXTS, change, copied, saved, with_names
from tokenizers import Tokenizer as Backend
from tokenizers import models
from tokenizers.processors import TemplateProcessing

from jaxformer.data.rows import RowFormat
from jaxformer.data.templates import ClassTemplate
from jaxformer.files import ConfigError
from jaxformer.tokenizer import (
    MARKS,
    Tokenizer,
    byte_tokenizer,
    character_tokenizer,
    train_bpe_tokenizer,
)


@pytest.mark.parametrize("again", [False, True], ids=["theirs", "ours"])
@pytest.mark.parametrize("kind", MODELS)
def test_ids_and_texts_are_those_of_transformers(kind: str, again: bool, tmp_path: Path) -> None:
    """With special tokens in the text and around it, and without; as transformers saved it, and as
    we did."""
    folder, hf = saved(kind), transformers.AutoTokenizer.from_pretrained(saved(kind))
    if again:
        Tokenizer.load(folder).save(tmp_path)
        folder = tmp_path
        (tmp_path / "config.json").write_text((saved(kind) / "config.json").read_text())
        again = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert again.special_tokens_map == hf.special_tokens_map
        assert again.get_vocab() == hf.get_vocab()
        hf = again
    ours = Tokenizer.load(folder)
    texts = with_names([str(name) for name in hf.all_special_tokens])
    marked = ours.encode_batch(texts, special_tokens=True)
    plain = ours.encode_batch(texts)
    for text, ids, bare in zip(texts, marked, plain, strict=True):
        assert ids == hf(text).input_ids, repr(text)
        theirs = hf(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert bare == theirs, repr(text)
        for row in (ids, bare):
            assert ours.decode(row) == hf.decode(row, skip_special_tokens=True), repr(text)
            assert ours.decode(row, skip_special_tokens=False) == hf.decode(row), repr(text)
    for row in np.random.default_rng(0).integers(0, ours.vocab_size, (50, 12)):
        assert ours.decode(row) == hf.decode(row, skip_special_tokens=True)
        assert ours.decode(row, skip_special_tokens=False) == hf.decode(row)


CLASSES = {
    "GPT2Tokenizer": ("gpt2", "gpt2"),
    "BertTokenizer": ("bert", "bert"),
    "RobertaTokenizer": ("bart", "roberta"),
}


@pytest.mark.parametrize("name", [*MODELS, *CLASSES])
def test_two_texts_are_in_the_template_of_transformers(name: str, tmp_path: Path) -> None:
    """Rows of training and of commands, with the types of their tokens, also where they are cut."""
    kind, family = CLASSES.get(name, (name, "unheard_of"))
    folder = saved(kind)
    if name in CLASSES:
        folder = copied(saved(kind), tmp_path, tokenizer_class=name)
        change(folder / "config.json", {"model_type": family})
    ours, hf = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    first, second = "The quick brown fox", "jumps over"
    theirs = hf(first, second, return_token_type_ids=True)
    frame = ours.frame(2)
    if frame is None:
        assert theirs.input_ids == [*ours.encode(first), *ours.encode(second)]
        return
    tokens, kinds = frame.fill(ours.encode_batch([first, second]))
    assert tokens.tolist() == theirs.input_ids
    assert kinds.tolist() == theirs.token_type_ids
    template = ClassTemplate(RowFormat(len(tokens), len(tokens), True, 2), ours)
    row = template.arrays(*map(np.array, [*ours.encode_batch([first, second]), [0]]))
    assert row["tokens"].tolist() == tokens.tolist()
    assert row["token_types"].tolist() == kinds.tolist()
    short = ClassTemplate(RowFormat(len(tokens) - 3, len(tokens), True, 2), ours)
    row = short.arrays(*map(np.array, [*ours.encode_batch([first, second]), [0]]))
    assert len(row["tokens"]) == len(tokens) - 3
    special = {slot.token for slot in frame.slots if slot.token is not None}
    count = sum(token in special for token in row["tokens"].tolist())
    assert count == frame.added


def test_a_template_that_changes_the_order_of_two_texts_is_named() -> None:
    backend = Backend.from_file(str(saved("bert") / "tokenizer.json"))
    ids = [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $B [SEP] $A [SEP]", special_tokens=ids
    )
    tokenizer = Tokenizer(backend)
    assert tokenizer.frame(1) is not None
    with pytest.raises(ConfigError, match=r"post_processor does not put each of 2 texts"):
        tokenizer.frame(2)


MADE = {
    "bpe": train_bpe_tokenizer(TEXTS, 400, MARKS),
    "bytes": byte_tokenizer(MARKS),
    "characters": character_tokenizer(TEXTS, MARKS),
}
NAMED = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


@pytest.mark.parametrize("kind", MADE)
def test_transformers_loads_what_is_made_here(kind: str, tmp_path: Path) -> None:
    tokenizer = MADE[kind]
    end = tokenizer.end_token
    tokenizer.save(tmp_path / "tokenizer.json", max_length=128)
    hf = transformers.AutoTokenizer.from_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["clean_up_tokenization_spaces"] is False
    assert hf.special_tokens_map == NAMED | {"eos_token": "<|endoftext|>"}
    assert hf.model_max_length == 128
    assert (hf.eos_token_id, hf.mask_token_id) == (end, tokenizer.special("mask"))
    for text in [TEXTS[0], TEXTS[2], "the cat [MASK] on<|endoftext|> it"]:
        ids = hf(text).input_ids
        assert tokenizer.encode(text, special_tokens=True) == ids
        assert tokenizer.decode(ids, False) == hf.decode(ids)
    assert Tokenizer.load(tmp_path).fingerprint() == tokenizer.fingerprint()
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    tokenizer.save(tmp_path / "alone" / "other.json")
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["other.json"]
    assert tokenizer.prefix == tokenizer.suffix == []
    assert tokenizer.as_source([5]) == [5, end] and tokenizer.as_target([5]) == [end, 5]
    assert tokenizer.as_prompt([5]) == [5]


def test_settings_that_change_ids_and_text_are_kept_to(tmp_path: Path) -> None:
    bpe = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    names = ("split_special_tokens", "clean_up_tokenization_spaces", bpe)
    folder = copied(saved("llama3"), tmp_path, **dict.fromkeys(names, True))
    ours, hf = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    text = "that 's all , isn't it ?<|eot_id|> yes !"
    ids = ours.encode(text, special_tokens=True)
    assert ids == hf(text).input_ids and ours.end_token not in ids
    cleaned = "that's all, isn't it?<|eot_id|> yes!"
    assert ours.decode(ids) == hf.decode(ids, skip_special_tokens=True) == cleaned


# What the template puts around a text, what an encoder-decoder reads, and what its decoder begins
# with.
READ = {
    "gpt2": ([], [], ["<|endoftext|>"], ["<|endoftext|>"]),
    "llama3": (["<|begin_of_text|>"], [], ["<|eot_id|>"], ["<|eot_id|>"]),
    "llama2": (["<s>"], [], ["</s>"], ["</s>"]),
    "qwen3": ([], [], ["<|im_end|>"], ["<|im_end|>"]),
    "gpt_oss": ([], [], ["<|return|>"], ["<|return|>"]),
    "bert": (["[CLS]"], ["[SEP]"], ["[SEP]"], ["[SEP]"]),
    "t5": ([], ["</s>"], ["</s>"], ["<pad>"]),
    "bart": (["<s>"], ["</s>"], ["</s>"], ["</s>", "<s>"]),
    "mbart": ([], ["</s>", "en_XX"], ["</s>", "en_XX"], ["ro_RO"]),
    "marian": ([], ["</s>"], ["</s>"], ["<pad>"]),
}


@pytest.mark.parametrize("kind", MODELS)
def test_what_stands_around_a_text_is_the_template_and_what_the_models_files_say(
    kind: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(saved(kind))
    tokenizer.save(tmp_path)
    names = Backend.from_file(str(tmp_path / "tokenizer.json"))
    for found in (tokenizer, Tokenizer.load(tmp_path)):
        prefix, suffix, closing, start = (
            [names.token_to_id(name) for name in part] for part in READ[kind]
        )
        assert (found.prefix, found.suffix) == (prefix, suffix)
        ids = found.encode("The cat")
        assert found.encode("The cat", special_tokens=True) == [*prefix, *ids, *suffix]
        assert found.as_prompt(ids) == [*prefix, *ids]
        assert found.as_source(np.array(ids)) == [*prefix, *ids, *closing]
        assert found.as_target(ids) == [*start, *ids]
        assert [found.start_token, found.forced_token][: len(start)] == start
        assert found.ids() == tokenizer.ids() and found.fingerprint() == tokenizer.fingerprint()


def test_roles_are_those_of_the_files_in_their_order(tmp_path: Path) -> None:
    folder = copied(saved("llama2"), tmp_path, eos_token=None, pad_token=None, bos_token=None)

    def ids_with(name: str, **keys: object) -> dict[str, int]:
        change(folder / f"{name}.json", keys)
        return Tokenizer.load(folder).ids()

    a, b, c = Tokenizer.load(folder).encode("the cat and")[:3]
    by_name = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    assert Tokenizer.load(folder).ids().items() >= by_name.items()
    wrong = dict(bos_token_id=-1, decoder_start_token_id=10**6, run={})
    ids = ids_with("config", eos_token_id=[10**6, a, b], **wrong)
    known = dict(eos_token_id=[a, b], bos_token_id=1, decoder_start_token_id=a)
    assert ids.items() >= known.items()
    stated = dict(eos_token_id=b, pad_token_id=c, decoder_start_token_id=c)
    ids = ids_with("generation_config", bos_token_id=None, **stated)
    assert ids == stated | dict(bos_token_id=1)
    found = Tokenizer.load(folder)
    assert found.fingerprint() != Tokenizer.load(saved("llama2")).fingerprint()
    found.save(tmp_path / "saved" / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "saved").ids() == ids
    older = {"eos_token": {"content": "<s>", "lstrip": False}}
    ids_with("special_tokens_map", **older, additional_special_tokens=["▁the"])
    found = Tokenizer.load(folder)
    the = found.encode("the", special_tokens=True)
    assert found.end_token == 1 and found.decode([found.end_token, *the]) == "" and the[0] == 1
    found.save(tmp_path / "older" / "tokenizer.json")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "older").eos_token_id == 1
    mask = {"__type": "AddedToken", "content": "<unk>"}
    ids_with("tokenizer_config", eos_token="</s>", mask_token=mask)
    found = Tokenizer.load(folder)
    assert [found.special(role) for role in ("eos", "mask", "unk", "cls", "sep")] == [2, 0, 0, 1, 2]


def test_what_is_not_known_of_the_files_is_carried_from_loading_to_saving(tmp_path: Path) -> None:
    settings = {
        "padding_side": "left",
        "model_max_length": 77,
        "chat_template": "{{ é }}",
        "own": {"deep": [1, None]},
        "fill_token": "<FILL_ME>",  # of CodeLlama: where its class splits a text
    }
    folder = copied(saved("bart"), tmp_path / "given", **settings)
    before = Tokenizer.load(folder).fingerprint()
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}→{% endfor %}\n", encoding="utf-8"
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.fingerprint() == before
    tokenizer.save(tmp_path / "saved" / "tokenizer.json", max_length=5)
    kept = tmp_path / "saved"
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        texts = [(place / name).read_text(encoding="utf-8") for place in (folder, kept)]
        assert texts[0] == texts[1] or json.loads(texts[0]) == json.loads(texts[1])
    written = json.loads((kept / "generation_config.json").read_text())
    assert written == {"forced_bos_token_id": 0}
    assert not [*tmp_path.rglob("*.tmp")]


def test_the_files_of_a_run_directory_say_nothing_of_tokens(tmp_path: Path) -> None:
    made = byte_tokenizer()
    made.save(tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text(
        json.dumps({"run": {"dir": "a"}, "model": {"vocab_size": 3}})
    )
    assert Tokenizer.load(tmp_path).fingerprint() == made.fingerprint()
    made.save(tmp_path / "cache" / "one.json")
    (tmp_path / "cache" / "tokenizer_config.json").write_text("{")
    assert Tokenizer.load(tmp_path / "cache" / "one.json").ids() == made.ids()


def added(index: str, content: str) -> dict[str, object]:
    return {"added_tokens_decoder": {index: {"content": content}}}


WRONG = {
    "tokenizer_config.json": [
        ({"eos_token": "<none>"}, r"eos_token is '<none>', which is not in the vocabulary"),
        ({"bos_token": 5}, r"bos_token is 5: a token is its text"),
        ({"pad_token": {"lstrip": True}}, r"pad_token is .*: a token is its text"),
        ({"extra_special_tokens": ["<none>"]}, r"special_tokens\[0\] is '<none>', which is not in"),
        ({"additional_special_tokens": 5}, r"additional_special_tokens is 5, and must be a list"),
        (added("9", "</s>"), r"gives '</s>' the id 9, and the vocabulary beside it 2: the two"),
        (
            added("100000", "<new>"),
            r"gives '<new>' the id 100000, and the vocabulary beside it \d+:",
        ),
        ({"added_tokens_decoder": [1]}, r"added_tokens_decoder must be an object"),
    ],
    "special_tokens_map.json": [
        ({"cls_token": "<none>"}, r"cls_token is '<none>', which is not in the vocabulary")
    ],
    "config.json": [
        ({"eos_token_id": "2"}, r"eos_token_id is '2', and must be the id"),
        ({"eos_token_id": -5}, r"eos_token_id is -5, and must be the id of a token, at least 0"),
        (None, "is not JSON"),
        (5, "int"),
    ],
    "generation_config.json": [
        ({"forced_bos_token_id": True}, r"bos_token_id is True, and must be the id of a token")
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_named_with_its_key(name: str, tmp_path: Path) -> None:
    for number, (settings, message) in enumerate(WRONG[name]):
        folder = copied(saved("llama2"), tmp_path / str(number))
        if isinstance(settings, dict):
            change(folder / name, settings)
        else:
            (folder / name).write_text("{" if settings is None else str(settings))
        with pytest.raises(ConfigError, match=rf"{name}.*{message}"):
            Tokenizer.load(folder)


def test_encoding_with_and_without_special_tokens_from_many_threads() -> None:
    tokenizer = Tokenizer.load(saved("bart"))
    text = "The <mask> cat</s> sat " * 50
    wanted = [Tokenizer.load(saved("bart")).encode(text, special) for special in (False, True)]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(tokenizer.encode, [text] * 400, [False, True] * 200)
    assert [*found] == wanted * 200


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "bart", "marian", "t5"])
def test_token_bytes_sum_to_those_of_the_text(kind: str) -> None:
    """Up to the space that SentencePiece sets before a text."""
    tokenizer = Tokenizer.load(saved(kind))
    sizes, edges = tokenizer.token_bytes(), tokenizer.word_edges()
    dummy = int(kind in ("llama2", "t5", "marian"))
    known = ["the cat sat on the mat", "The quick brown fox, and 12,345 dogs"]
    if kind not in ("t5", "marian"):
        known += ["tab\t\nline  two  ", "🙂👍🏽 世界 и שׁ \u0301"]
    for text in known:
        ids = tokenizer.encode(text)
        assert sizes[ids].sum() == len(text.encode()) + dummy
        if text.isascii():
            assert "".join(map(tokenizer.shown, ids)) == " " * dummy + text
    assert not sizes[[tokenizer.end_token, tokenizer.special("unk") or tokenizer.end_token]].any()
    ids = tokenizer.encode("The lazy dog jumps")
    words = np.cumsum(~(edges[ids, 0] & np.roll(edges[ids, 1], 1)))
    texts = dict.fromkeys(words, "")
    for token, word in zip(ids, words, strict=True):
        texts[word] += tokenizer.shown(token)
    shown = [text.strip() for text in texts.values() if text.strip()]
    assert shown == ["The", "lazy", "dog", "jumps"]


def test_bytes_of_llama_2_stand_for_themselves() -> None:
    tokenizer = Tokenizer.load(saved("llama2"))
    ids = tokenizer.encode("🦙")
    assert [tokenizer.shown(token) for token in ids] == [" ", "\\xf0", "\\x9f", "\\xa6", "\\x99"]
    assert tokenizer.word_edges()[ids].tolist() == [[False, False], *[[True, True]] * 4]
    assert tokenizer.decode(ids) == "🦙" and tokenizer.token_bytes()[ids].tolist() == [1] * 5


def test_a_token_of_a_plain_vocabulary_stands_for_its_own_bytes() -> None:
    backend = Backend(models.WordLevel({"\u2581a": 0, "</s>": 1}, unk_token="\u2581a"))
    backend.add_tokens(["<new>"])
    backend.add_special_tokens(["</s>"])
    assert Tokenizer(backend).token_bytes().tolist() == [4, 0, 5]


def test_all_tokens_that_end_a_text_are_read_and_written(tmp_path: Path) -> None:
    folder = copied(saved("llama2"), tmp_path / "there")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, 9]}))
    found = Tokenizer.load(folder)
    assert found.end_token == 2 and found.end_tokens == (2, 5, 9)
    assert found.ids()["eos_token_id"] == [2, 5, 9]
    found.save(tmp_path)
    assert Tokenizer.load(tmp_path).end_tokens == (2, 5, 9)


def test_a_model_with_gpt2s_own_files_is_read_with_its_tokenizer(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    import jaxformer as jf
    from jaxformer.config.run import TokenizerConfig
    from jaxformer.runs.model_files import ModelFiles

    kept = json.loads((saved("gpt2") / "tokenizer.json").read_text())["model"]
    sizes = {"vocab_size": 1000, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps(kept["vocab"]))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in kept["merges"])]
    (tmp_path / "merges.txt").write_text("\n".join(lines) + "\n")
    tokenizer, text = jf.load(tmp_path).tokenizer, "The quick  brown fox."
    assert tokenizer is not None
    assert tokenizer.encode(text) == Tokenizer.load(saved("gpt2")).encode(text)
    path = ModelFiles(tmp_path).with_tokenizer(TokenizerConfig()).path
    assert Tokenizer.load(path).fingerprint() == tokenizer.fingerprint()
    (tmp_path / "merges.txt").unlink()
    assert jf.load(tmp_path).tokenizer is None


BERTS = {"tokenizer_class": "BertTokenizer"}
# The model_type, the kind of tokenizer, and settings that a class of transformers reads.
SETTINGS = [
    ("bert", "bert", BERTS),
    ("bert", "bert", BERTS | {"do_lower_case": False}),
    ("bert", "bert", BERTS | {"strip_accents": True}),
    ("bert", "bert", {"tokenizer_class": "DistilBertTokenizerFast", "strip_accents": False}),
    ("bert", "bert", {"tokenizer_class": "MPNetTokenizer", "tokenize_chinese_chars": False}),
    ("unheard_of", "bert", {"do_lower_case": False}),  # tokenizer.json is read as it is
    ("bert", "bert", {"tokenizer_class": None}),  # that of config.json
    ("llama", "llama2", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
    ("gpt2", "gpt2", {"tokenizer_class": "GPT2Tokenizer"}),
    ("gpt2", "gpt2", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
    ("gpt2", "gpt2", {"add_prefix_space": True}),
    ("roberta", "bart", {"tokenizer_class": "RobertaTokenizer"}),
    ("roberta", "bart", {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": True}),
]


@pytest.mark.parametrize("family, kind, settings", SETTINGS)
def test_what_a_class_reads_from_its_settings_is_that_of_transformers(
    family, kind, settings, tmp_path
):
    folder = copied(saved(kind), tmp_path / "tokenizer", **settings)
    change(folder / "config.json", {"model_type": family})
    spec = json.loads((folder / "tokenizer.json").read_text())
    if settings == {"tokenizer_class": None}:
        spec["normalizer"]["lowercase"] = False
        (folder / "tokenizer.json").write_text(json.dumps(spec))
    ours, hf = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    # Without those that a class adds to a vocabulary of another family.
    specials = [str(token) for token in hf.all_special_tokens if ours.id_of(str(token)) is not None]
    for text in (*with_names(specials), "Héllo Wörld, naïve CAFÉ", "東京 bar"):
        assert (ids := ours.encode(text, special_tokens=True)) == hf(text).input_ids, repr(text)
        assert ours.decode(ids) == hf.decode(ids, skip_special_tokens=True)


def test_bpe_dropout_is_left_out_and_said(tmp_path):
    folder = copied(saved("gpt2"), tmp_path / "tokenizer")
    file = folder / "tokenizer.json"
    spec = json.loads(file.read_text())
    plain = Tokenizer.load(folder).encode("Hello world, hello")
    file.write_text(json.dumps(spec | {"model": spec["model"] | {"dropout": 0.5}}))
    with pytest.warns(UserWarning, match="the BPE dropout of 0.5 is left out"):
        tokenizer = Tokenizer.load(folder)
    assert all(tokenizer.encode("Hello world, hello") == plain for _ in range(20))


@pytest.mark.parametrize(
    "index, said",
    [
        (5, r"gives the id 5 to '.*' and to '.*'"),
        (2**31, r"gives 'Ġ' the id 2147483648, and ids are below 16777216"),
        (2**32 - 1, "ids are below"),
        (-1, "is not a tokenizer.json"),
        (10**400, "is not a tokenizer.json"),
    ],
)
def test_an_id_that_cannot_be_is_one_message(index, said, tmp_path):
    folder = copied(saved("gpt2"), tmp_path / "tokenizer")
    file = folder / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["model"]["vocab"]["Ġ"] = index
    file.write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match=said):
        Tokenizer.load(folder)
