"""Chat templates: ids and what is learned are those of transformers, in each style of template."""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from chat_templates import (
    BLOCKS,
    CALL,
    CHATML,
    CONVERSATIONS,
    DOCUMENTS,
    FUNCTIONS,
    MISTRAL,
    SPECIAL,
    STYLES,
    SYSTEM,
    TOOL_STYLES,
    TOOLS,
    WITH_CALLS,
    without_blocks,
)
from pretrained_tokenizers import change, saved

from jaxformer.cluster.bounded import BoundedProcess
from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer, byte_tokenizer
from jaxformer.tokenizer.chat import (
    ChatTemplate,
    UnboundedTemplate,
    set_chat_template,
    template_fingerprint,
    with_beside,
    without_nulls,
)


def folder_of(kind: str, template: str, folder: Path) -> Path:
    """A tokenizer of a kind with a template, as transformers saves it."""
    hf = transformers.AutoTokenizer.from_pretrained(saved(kind))
    hf.add_special_tokens({"additional_special_tokens": SPECIAL})
    hf.chat_template = template
    hf.save_pretrained(folder)
    return folder


def both(kind: str, template: str, folder: Path) -> tuple[ChatTemplate, Any]:
    folder_of(kind, template, folder)
    hf = transformers.AutoTokenizer.from_pretrained(folder)
    return ChatTemplate.of(Tokenizer.load(folder), today=True), hf


@pytest.mark.parametrize("style", STYLES)
def test_ids_and_prompts_are_those_of_transformers(style: str, tmp_path: Path) -> None:
    template, kind = STYLES[style]
    ours, hf = both(kind, template, tmp_path)
    system = SYSTEM if style in ("chatml", "llama3", "zephyr") else []
    for name, turns in CONVERSATIONS.items():
        messages = [*system, *turns]
        ids, learned = ours.encode(messages)
        theirs = hf.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert ids == theirs, name
        assert len(learned) == len(ids) and any(learned) and not learned[0]
        assert ours.render(messages) == hf.apply_chat_template(messages, tokenize=False)
        asked = hf.apply_chat_template(
            messages[:-1], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert ours.encode_prompt(messages[:-1]) == asked


@pytest.mark.parametrize("style", [*BLOCKS, "tools"])
def test_what_is_learned_is_the_assistant_mask_of_transformers(style: str, tmp_path: Path) -> None:
    kind = STYLES[style][1]
    ours, hf = both(kind, BLOCKS.get(style, TOOLS), tmp_path / "blocks")
    assert ours.has_blocks
    for name, messages in CONVERSATIONS.items():
        expected = hf.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, learned = ours.encode(messages)
        assert ids == expected["input_ids"], name
        assert [int(value) for value in learned] == expected["assistant_masks"], name
    if style in BLOCKS:  # the same turns, found by the prompts for them
        plain, _ = both(kind, STYLES[style][0], tmp_path / "plain")
        assert not plain.has_blocks
        assert all(
            plain.encode(messages) == ours.encode(messages) for messages in CONVERSATIONS.values()
        )


@pytest.mark.parametrize(
    ("style", "end_name"),
    [
        ("chatml", "<|im_end|>"),
        ("llama3", "<|eot_id|>"),
        ("gemma", "<end_of_turn>"),
        ("zephyr", "</s>"),
        ("mistral", "</s>"),
    ],
)
def test_only_the_turns_of_the_assistant_are_learned_with_their_end(
    style: str, end_name: str, tmp_path: Path
) -> None:
    template, kind = STYLES[style]
    ours, _ = both(kind, template, tmp_path)
    tokenizer, messages = ours.tokenizer, CONVERSATIONS["two"]
    ids, learned = ours.encode(messages)
    turns, before = list[list[int]](), False
    for token, inside in zip(ids, learned, strict=True):
        if inside:
            turns = turns if before else [*turns, []]
            turns[-1].append(token)
        before = inside
    end = ours.end_of_turn(messages[:1])
    assert end is not None and tokenizer.shown(end) == end_name
    assert [turn[-1] for turn in turns] == [end, end]
    shown = [tokenizer.decode(turn, skip_special_tokens=True).strip() for turn in turns]
    assert shown == [messages[1]["content"], messages[3]["content"].strip()]
    # the prompt for a turn is what stands before it
    first = learned.index(True)
    assert ours.encode_prompt(messages[:1]) == ids[:first]
    plain = "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"
    assert ChatTemplate(plain, tokenizer, "plain").end_of_turn(messages[:1]) is None


@pytest.mark.parametrize("trim", [False, True], ids=["whole", "trimmed"])
def test_a_token_across_a_border_is_not_learned(trim: bool, tmp_path: Path) -> None:
    """GPT-2's tokens hold the space before a word, here the template's own, also where offsets are
    said to leave it out; a word that the template ends is no word of the assistant."""
    template = "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
    blocks = "{% generation %}{{ m.content }}{% endgeneration %}at"
    template += blocks + "{% else %}{{ m.content }}{% endif %} {% endfor %}"
    folder = folder_of("gpt2", template, tmp_path)
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["post_processor"]["trim_offsets"] = trim
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = Tokenizer.load(folder)
    ours = ChatTemplate.of(tokenizer)
    messages = [CONVERSATIONS["one"][0], {"role": "assistant", "content": "on the c"}]
    text = "user: the cat sat assistant: on the cat "
    ids, learned = ours.encode(messages)
    assert ours.render(messages) == text
    assert ids == transformers.AutoTokenizer.from_pretrained(folder)(text).input_ids
    inside = [token for token, value in zip(ids, learned, strict=True) if value]
    assert tokenizer.decode(inside) == " the"
    assert tokenizer.decode(ids[: learned.index(True)]) == "user: the cat sat assistant: on"


def test_blocks_are_found_wherever_the_template_writes_them(tmp_path: Path) -> None:
    """In a macro and in a variable, where the text before them is not yet known."""
    template = (
        "{% macro turn(m) %}<|im_start|>{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% endmacro %}{% set said %}"
        "{% for m in messages if m.role == 'assistant' %}{{ turn(m) }}{% endfor %}{% endset %}"
        "{{ messages[0].content + said }}"
    )
    ours, _ = both("llama3", template, tmp_path)
    text, spans = ours.marked(CONVERSATIONS["one"])
    assert text == "the cat sat<|im_start|>on the mat<|im_end|>"
    assert [text[begin:end] for begin, end in spans] == ["on the mat<|im_end|>"]


FORMS: dict[str, Any] = {
    "text": CHATML,
    "list": [{"name": "other", "template": "x"}, {"name": "default", "template": CHATML}],
}


@pytest.mark.parametrize("form", FORMS)
def test_a_template_is_found_in_the_settings_and_in_its_own_file(form: str, tmp_path: Path) -> None:
    folder = folder_of("gpt2", CHATML, tmp_path)
    expected = ChatTemplate.of(Tokenizer.load(folder))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"has no chat template, neither .* tokenizer\.chat_temp"):
        ChatTemplate.of(Tokenizer.load(folder))
    change(folder / "tokenizer_config.json", {"chat_template": FORMS[form]})
    found = ChatTemplate.of(Tokenizer.load(folder))
    assert template_fingerprint(found.tokenizer) == template_fingerprint(expected.tokenizer)
    hf = transformers.AutoTokenizer.from_pretrained(folder)
    messages = CONVERSATIONS["two"]
    assert found.render(messages) == hf.apply_chat_template(messages, tokenize=False)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")  # is read first
    found, hf = (
        ChatTemplate.of(Tokenizer.load(folder)),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    assert found.render(messages) == hf.apply_chat_template(messages, tokenize=False)
    assert template_fingerprint(found.tokenizer) != template_fingerprint(expected.tokenizer)


def test_a_template_that_is_set_is_saved_for_transformers(tmp_path: Path) -> None:
    folder = folder_of("gpt2", "{{ own }}", tmp_path / "given")
    change(folder / "tokenizer_config.json", {"chat_template": "{{ older }}"})
    for tokenizer in (Tokenizer.load(folder), byte_tokenizer()):
        (tmp_path / "set.jinja").write_text(CHATML + "{{ eos_token }}")
        set_chat_template(tokenizer, tmp_path / "set.jinja")
        made = ChatTemplate.of(tokenizer)
        target = tmp_path / f"saved{tokenizer.vocab_size}"
        tokenizer.save(target / "tokenizer.json")
        hf = transformers.AutoTokenizer.from_pretrained(target)
        messages = CONVERSATIONS["two"]
        text = hf.apply_chat_template(messages, tokenize=False)
        assert made.render(messages) == text and text.endswith("<|endoftext|>")
        again = ChatTemplate.of(Tokenizer.load(target))
        assert template_fingerprint(again.tokenizer) == template_fingerprint(made.tokenizer)
        assert "chat_template" not in json.loads((target / "tokenizer_config.json").read_text())


def test_training_data_does_not_depend_on_the_day(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_of("llama3", TOOLS, tmp_path))
    messages = CONVERSATIONS["one"]
    assert "user 2024\n" in ChatTemplate.of(tokenizer).render(messages)
    assert "user 2024\n" not in ChatTemplate.of(tokenizer, today=True).render(messages)


@pytest.mark.parametrize("style", ["chatml", "mistral"])
@pytest.mark.parametrize("key", ["weight", "trainable", "train_on_turn", "loss", "masked"])
def test_turns_that_the_data_excludes_are_read_and_not_learned(style, key, tmp_path):
    """In blocks of a template and without them; the text is that without the key."""
    kind = STYLES[style][1]
    for template in (STYLES[style][0], BLOCKS[style]):
        ours, _ = both(kind, template, tmp_path / f"{len(template)}")
        turns = [USER, {"role": "assistant", "content": "no"}, USER, SAID]
        ids, every = ours.encode(turns)
        excluded = [USER, {**turns[1], key: key == "masked"}, USER, SAID]
        again, learned = ours.encode(excluded)
        assert again == ids
        text = ours.tokenizer.decode([i for i, kept in zip(ids, learned, strict=True) if kept])
        assert "b" in text and "no" not in text and sum(learned) < sum(every)


@pytest.mark.parametrize("style", TOOL_STYLES)
def test_tools_calls_and_documents_are_rendered_and_learned_as_in_transformers(style, tmp_path):
    """With generation blocks, and as published, without them; arguments as JSON are the object."""
    template, kind = TOOL_STYLES[style]
    ours, hf = both(kind, template, tmp_path / "blocks")
    plain, _ = both(kind, without_blocks(template), tmp_path / "plain")
    assert ours.has_blocks and not plain.has_blocks
    context: dict[str, Any] = {"tools": FUNCTIONS, "documents": DOCUMENTS}
    as_json = {**CALL, "arguments": json.dumps(CALL["arguments"])}
    calls = [{"type": "function", "id": "call12345", "function": as_json}]
    for end in (2, 4, 6):
        expected = hf.apply_chat_template(
            WITH_CALLS[:end], **context, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = expected["assistant_masks"]
        for messages in (WITH_CALLS, [WITH_CALLS[0], {**WITH_CALLS[1], "tool_calls": calls}]):
            record = [
                with_beside(messages[0], context),
                *messages[1:],
                *WITH_CALLS[len(messages) :],
            ]
            for template_of_ours in (ours, plain):
                ids, learned = template_of_ours.encode(record[:end])
                assert ids == expected["input_ids"]
                assert [int(value) for value in learned] == mask
        asked = hf.apply_chat_template(
            WITH_CALLS[: end - 1], **context, add_generation_prompt=True, return_dict=False
        )
        assert ours.encode_prompt(record[: end - 1]) == asked
    text = ours.tokenizer.decode([i for i, kept in zip(ids, mask, strict=True) if kept])
    for written in ("Zürich", "Dry, mostly.", "Noon."):
        assert written in text
    assert "rain" not in text and "And the time" not in text
    whole = ours.render(record)
    assert "required" in whole and ("It rains." in whole) == (style == "smollm3")


def test_what_stands_beside_messages_and_parts_of_text_are_rendered_as_transformers_does(tmp_path):
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    ours, hf = both("llama3", template, tmp_path)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": 1, "b": None}}}]
    stated = [with_beside(USER, {"tools": json.dumps(tools)}), SAID]
    text = hf.apply_chat_template([USER, SAID], tools=without_nulls(tools), tokenize=False)
    assert '"name": "f"' in text and ours.render(stated) == text
    parts = {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}
    assert ours.encode([parts, SAID]) == ours.encode([{"role": "user", "content": "ab"}, SAID])
    for none in ("", "[]", "null", [], None):
        assert with_beside(USER, {"tools": none, "functions": []}) == USER
    for key in ("tools", "documents"):
        for wrong in ("search", ["search"], [3], {"name": "f"}, "{}x"):
            with pytest.raises(ConfigError, match=f"{key} beside messages are a list of objects"):
                with_beside(USER, {key: wrong})
    for key in ("functions", "chat_template_kwargs"):
        with pytest.raises(ConfigError, match=f"{key} beside messages is not read"):
            with_beside(USER, {key: [{"name": "f"}]})


USER = {"role": "user", "content": "a"}
SAID = {"role": "assistant", "content": "b"}
REFUSED: dict[str, tuple[str, Any, str]] = {
    "no list": (CHATML, "hello", r"str \('hello'\) is no conversation: give a list of messages"),
    "none": (CHATML, [], r"has no messages"),
    "no object": (CHATML, [USER, "b"], r"message 2 has no .role.* but is str \('b'\)"),
    "no role": (CHATML, [{"from": "user", "content": "a"}], r"message 1 has no .role.*'from'"),
    "no content": (CHATML, [USER, {"role": "assistant"}], r"message 2 has the content NoneType"),
    "parts": (
        CHATML,
        [{"role": "user", "content": [{"type": "image"}]}, SAID],
        r"message 1 has the content list .*, since only text is read",
    ),
    "other parts": (
        CHATML,
        [USER, {"role": "assistant", "content": [{"type": "reasoning", "text": "?"}]}],
        r"message 2 has the content list .*, since only text is read",
    ),
    "a call": (
        TOOLS,
        [USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}],
        r"message 2 has the tool call dict .*: give tool_calls as",
    ),
    "a weight": (CHATML, [USER, {**SAID, "weight": 0.5}], r"message 2 has weight=float \('0.5'\)"),
    "a part": (CHATML, [USER, {**SAID, "train_detail": [{}]}], r"message 2 has train_detail=list"),
    "a scale": (CHATML, [USER, {**SAID, "loss_scale": 0.1}], r"message 2 has loss_scale=float"),
    "no turn left": (CHATML, [USER, {**SAID, "train": False}], r"exclude all turns of the role"),
    "blocks of no turn": (
        BLOCKS["chatml"].replace(
            "{% generation %}", "{% generation %}+{% endgeneration %}{% generation %}"
        ),
        [USER, SAID, USER, {**SAID, "weight": 0}],
        r"4 generation blocks for 2 turns",
    ),
    "no assistant": (CHATML, [USER], r"no message has the role 'assistant' \(the roles are 'user'"),
    "order of roles": (
        MISTRAL,
        [USER, USER, SAID],
        r"refuses the messages: user and assistant must alternate, user",
    ),
    "a stranger's code": (
        "{{ messages.__class__.__mro__ }}",
        [USER, SAID],
        r"refuses the messages: access to attribute '__class__'",
    ),
    "no prefix": (
        "{% for m in messages %}{{ loop.length ~ m.content }}{% endfor %}",
        [USER, SAID],
        r"renders message 2 otherwise .*Put \{% generation %\} .* tokenizer\.",
    ),
    "an end at the end": (
        CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        [USER, SAID, USER, SAID],
        r"renders message 2 otherwise than at the beginning of what follows",
    ),
    "the first alone": (
        "{% if messages | length < 2 %}{{ raise_exception('too few') }}{% endif %}x",
        [USER, SAID],
        r"too few \(the first 1, .* generation",
    ),
    "empty blocks": (
        CHATML + "{% generation %}{% endgeneration %}",
        [USER, SAID],
        r"writes nothing of the assistant's turns inside of \{% generation %\}",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_ids_is_one_message(case: str, tmp_path: Path) -> None:
    template, messages, message = REFUSED[case]
    ours = ChatTemplate(template, byte_tokenizer(), "the template")
    with pytest.raises(ConfigError, match=message):
        ours.encode(messages)


def test_a_template_that_is_none_is_named_with_its_line(tmp_path: Path) -> None:
    for text, message in (
        ("a\n{% for m in messages %}", r"line 2: .*endfor"),
        ("{% generation %}", r"line 1: "),
        ("{% unknown %}", r"line 1: .*unknown"),
    ):
        with pytest.raises(ConfigError, match=rf"the template is no template of Jinja \({message}"):
            ChatTemplate(text, byte_tokenizer(), "the template")
    with pytest.raises(ConfigError, match=r"nowhere\.jinja does not exist: set tokenizer\.chat_te"):
        set_chat_template(byte_tokenizer(), tmp_path / "nowhere.jinja")
    folder = folder_of("gpt2", CHATML, tmp_path)
    (folder / "chat_template.jinja").unlink()
    for value, message in ((5, "must be a text"), ([{"name": "rag"}], "or a list with")):
        change(folder / "tokenizer_config.json", {"chat_template": value})
        with pytest.raises(ConfigError, match=rf"tokenizer_config\.json: chat_template.*{message}"):
            ChatTemplate.of(Tokenizer.load(folder))


def test_without_jinja_or_with_an_old_one_the_message_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = (
        r"the template needs jinja2 3\.1\.6 or newer, and here it is {}: pip install"
        r" 'jaxformer\[chat\]'"
    )
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jinja2", None)
        with pytest.raises(ConfigError, match=message.format("not installed")):
            ChatTemplate(CHATML, byte_tokenizer(), "the template")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.1.5")
    with pytest.raises(ConfigError, match=message.format(r"3\.1\.5")):
        ChatTemplate(CHATML, byte_tokenizer(), "the template")


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TIME, SPACE = r"takes more than 0\.5 s", r"takes more than 1 GiB of memory"
UNBOUNDED = {  # the template, what is said of it, whether it is compiled without end
    "loops": (LOOPS, TIME, False),
    "a power of constants": ("{{ 10 ** 100000000 }}", TIME, True),
    "a wide number": ("{{ '%02000000000d' % 1 }}", SPACE, None),
    "a long text": (
        "{% for i in range(90000) %}{{ 'abcd' * 1000 }}{% endfor %}",
        "writes more",
        False,
    ),
}


@pytest.mark.parametrize("case", UNBOUNDED)
def test_a_template_beyond_the_bounds_is_one_message(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, message, at_once = UNBOUNDED[case]
    renderer = BoundedProcess("jaxformer.tokenizer.chat_environment", "answer", seconds=0.5)
    monkeypatch.setattr("jaxformer.tokenizer.chat.RENDERER", renderer)
    when = {True: "where it is compiled", False: "where 2 messages are rendered", None: "where "}
    said = rf"^the template {message}.*, {when[at_once]}.*: correct it, or set tokenizer\.chat_tem"
    with pytest.raises(UnboundedTemplate, match=said):
        ChatTemplate(template, byte_tokenizer(), "the template").encode([USER, SAID])
    after = ChatTemplate(CHATML, byte_tokenizer(), "another")
    assert after.render([USER]).startswith("<|im_start|>user")
    renderer.close()


def test_what_a_template_and_messages_say_is_cut_or_refused() -> None:
    ours = ChatTemplate("{{ raise_exception('x' * 100000) }}", byte_tokenizer(), "the template")
    with pytest.raises(ConfigError, match=r"^the template refuses the messages: x{1000}\.\.\.$"):
        ours.render([USER])
    ours = ChatTemplate(CHATML, byte_tokenizer(), "the template")
    with pytest.raises(ConfigError, match=r"hold a value that JSON cannot hold .*bytes"):
        ours.render([{**USER, "extra": b"a"}])
