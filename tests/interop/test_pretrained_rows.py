"""What models are trained on, and read, with a tokenizer from a Hugging Face directory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from corpora import cut_rows, template_of
from pretrained_tokenizers import TEXTS, saved
from tokenizers import Tokenizer as Backend

from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig
from jaxformer.data.spans import PrefixRows, SpanRows
from jaxformer.data.store import Shard, TokenStore
from jaxformer.data.templates import PairTemplate, SFTTemplate
from jaxformer.runs.prompting import Model
from jaxformer.tokenizer import SENTINELS, Tokenizer


@pytest.mark.parametrize("kind", ["t5", "bart", "marian"])
def test_pairs_are_what_transformers_trains_an_encoder_decoder_on(kind: str) -> None:
    """The source and the labels are texts in the template, and the decoder reads the labels after
    its start token."""
    ours, hf = Tokenizer.load(saved(kind)), transformers.AutoTokenizer.from_pretrained(saved(kind))
    run = RunConfig(
        model=ModelConfig(family="encoder_decoder"),
        data=DataConfig(sequence_length=8, source_length=6),
    )
    template = template_of(PairTemplate, run, ours)
    for source, target in [("the cat", "sat"), (TEXTS[0], TEXTS[3])]:
        (parts,) = template.encode([(source, target)], {})
        row = template.arrays(*(np.array(part) for part in parts))
        read, labels = hf(source).input_ids, hf(target).input_ids
        assert row["source"].tolist() == ([*read[:5], read[-1]] if len(read) > 6 else read)
        assert row["targets"].tolist() == (
            labels := [*labels[:7], labels[-1]] if len(labels) > 8 else labels
        )
        assert row["tokens"].tolist() == [ours.start_token, *labels[:-1]]
        assert row["weights"].tolist() == [1] * len(labels)
        sizes = template.sizes(np.array([[len(part) for part in parts]]))
        assert sizes.tolist() == [[len(read), len(hf(target).input_ids)]]


@pytest.mark.parametrize("rows", [PrefixRows, SpanRows])
@pytest.mark.parametrize("kind", ["t5", "bart"])
@pytest.mark.parametrize(("length", "source_length"), [(16, 16), (12, 16), (16, 9)])
def test_rows_of_plain_text_stand_in_the_template_and_fit(
    rows: Any, kind: str, length: int, source_length: int, tmp_path: Path
) -> None:
    backend = Backend.from_file(str(saved(kind) / "tokenizer.json"))
    backend.add_special_tokens([*SENTINELS[:9]])
    for file in saved(kind).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    text = np.array(tokenizer.encode(" ".join(TEXTS)), np.uint16)[:300]
    store = TokenStore(
        [Shard(tmp_path / "ids", 300, 0, 0, {}, {"tokens": lambda: text})], text.dtype, "text"
    )
    data = DataConfig(sequence_length=length, source_length=source_length)
    run = RunConfig(model=ModelConfig(family="encoder_decoder"), data=data)
    made = cut_rows(rows, store, run, tokenizer)
    before, around = tokenizer.as_target([])[1:], len(tokenizer.as_source([]))
    read, written = [], []
    for seed in range(60):
        row = made.row(0, np.random.default_rng(seed))
        source = row["source"][row["source_segment_ids"] > 0].tolist()
        targets = row["targets"][row["weights"] > 0].tolist()
        inner, after = source[len(tokenizer.prefix) : -1], targets[len(before) :]
        assert source == tokenizer.as_source(inner) and targets[: len(before)] == before
        assert row["tokens"][: len(targets)].tolist() == [tokenizer.start_token, *targets[:-1]]
        assert len(row["source"]) == source_length and len(row["tokens"]) == length
        if rows is PrefixRows:
            assert [*inner, *after] == text[: len(inner) + len(after)].tolist()
        else:
            assert after[-1] == tokenizer.end_token
        read.append(len(source))
        written.append(len(targets))
    if rows is PrefixRows:
        assert len(inner) + len(after) == 1 + min(source_length - around, length - len(before))
        assert max(read) == min(source_length, length - len(before) + around)
    else:
        assert set(read) == {source_length} and max(written) <= length


def test_a_decoder_answers_to_the_prompt_that_it_is_given_later() -> None:
    tokenizer = Tokenizer.load(saved("llama2"))
    run = RunConfig(model=ModelConfig(), data=DataConfig(sequence_length=64))
    template = template_of(SFTTemplate, run, tokenizer)
    (parts,) = template.encode([("the cat", " sat")], {})
    row = template.arrays(*(np.array(part) for part in parts))
    prompt = tokenizer.as_prompt(tokenizer.encode("the cat"))
    answer = tokenizer.encode("the cat sat")[len(tokenizer.encode("the cat")) :]
    assert row["tokens"].tolist() == [*prompt, *answer]
    assert row["targets"][-1] == tokenizer.end_token
    assert row["weights"].tolist() == [0] * (len(prompt) - 1) + [1] * (len(answer) + 1)
    sizes = template.sizes(np.array([[len(part) for part in parts]]))
    assert sizes.tolist() == [[len(row["tokens"])]]


def test_what_is_written_after_a_prompt_keeps_its_space() -> None:
    tokenizer = Tokenizer.load(saved("llama2"))
    ids = tokenizer.encode("the cat sat")
    start, rest = tokenizer.as_prompt(ids[:2]), ids[2:]
    model = Model(params={}, config=ModelConfig(), tokenizer=tokenizer, run=RunConfig())
    written = model.text_after(start, rest)
    assert tokenizer.decode(start) + written == "the cat sat"
