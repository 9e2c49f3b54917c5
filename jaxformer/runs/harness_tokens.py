"""The texts of the evaluation harness as token ids: special tokens, conversations, and what stops a
text.

Importing this file imports lm_eval, an optional package.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM

from jaxformer.files import ConfigError
from jaxformer.tokenizer.chat import PROBE, ChatTemplate, template_fingerprint, template_of

LOG = logging.getLogger(__name__)


class HarnessTokens(TemplateLM):
    """What the harness asks of the tokenizer of a model; the model itself is added in
    `HarnessModel`. `add_bos_token` None follows the tokenizer's template."""

    def __init__(self, tokenizer: Any, backend: str, add_bos_token: bool | None) -> None:
        super().__init__()
        self.tokenizer, self.backend, self.add_bos_token = tokenizer, backend, add_bos_token
        # The token that ends an answer in a conversation, if any; None before the first one.
        self._turn_ends: set[int] | None = None

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.end_token

    @property
    def prefix_token_id(self) -> int:
        """The context of a text that has none."""
        begin = self.tokenizer.special("bos")
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Under this name the harness keeps requests, in which the template of chats is written."""
        return f"{self.tokenizer.fingerprint()}-{template_fingerprint(self.tokenizer)}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template of chats; None where it is switched off. Raises ConfigError for a name other
        than "default", and where there is none."""
        if not chat_template:
            return None
        if chat_template not in (True, "default"):
            raise ConfigError(
                f"--apply_chat_template {chat_template}: the model jaxformer renders the default"
                " template of a tokenizer alone; leave out the name."
            )
        text, _ = template_of(self.tokenizer)
        return text

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of messages, with the beginning of an answer, or else up to the end of the last
        message, which the model goes on with.

        As for the harness's own models, a template that refuses a system message gets none. From
        now on an answer ends with the token with which the template ends a turn. Raises ConfigError
        where there is no template, and for what it refuses.
        """
        try:
            if self._turn_ends is None:
                asked = chat_history if add_generation_prompt else chat_history[:-1]
                end = self._template.end_of_turn(asked)
                self._turn_ends = set() if end is None else {end}
            return self._rendered(chat_history, add_generation_prompt)
        except ConfigError as error:
            spoken = [message for message in chat_history if message["role"] != "system"]
            if len(spoken) == len(chat_history):
                raise
            LOG.warning(f"{error}: the system message is left out.")
            return self._rendered(spoken, add_generation_prompt)

    def _rendered(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        if add_generation_prompt:
            return self._template.render(messages, True)
        # The last message is cut where its content ends. A template may strip what it writes.
        *before, last = messages
        marked = last | {"content": f"{last['content']}{PROBE} "}
        text, _, after = self._template.render([*before, marked]).rpartition(PROBE)
        return text if after.startswith(" ") else text.rstrip()

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.of(self.tokenizer, today=True)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids, with the special tokens of the template unless they are switched off or the
        text begins with one. With them a source ends with the end token."""
        ids = self.tokenizer.encode(string, special_tokens=True)
        prefix_length, suffix_length = len(self.tokenizer.prefix), len(self.tokenizer.suffix)
        if add_special_tokens is None:
            has_prefix = string.startswith(self.tokenizer.shown(self.prefix_token_id))
            add_special_tokens = not has_prefix
        if self.add_bos_token is False or not add_special_tokens:
            return ids[prefix_length : len(ids) - suffix_length]
        if self.backend == "seq2seq" and ids[-1:] != [self.eot_token_id]:
            ids = [*ids, self.eot_token_id]
        return [self.prefix_token_id, *ids] if self.add_bos_token and not prefix_length else ids

    def stops_of(self, until: Sequence[Any]) -> tuple[list[str], set[int]]:
        """The texts that stop a text, and the tokens that do.

        A text lacks special tokens, so that a stop that is the name of one is that token. Raises
        ConfigError for a stop that is no text, or that has such a name behind other text.
        """
        stops = [stop for stop in until if stop not in (None, "")]
        names = {name: self.tokenizer.id_of(name) for name in self._special_names}
        texts, ends = [self.tokenizer.shown(self.eot_token_id)], {*(self._turn_ends or ())}
        for stop in stops:
            if not isinstance(stop, str):
                raise ConfigError(f"generation_kwargs: until has {stop!r}, and takes texts.")
            name = next((name for name in names if name in stop), None)
            if name is None:
                texts.append(stop)
            elif stop.lstrip().startswith(name):
                ends.add(names[name])
            else:
                raise ConfigError(
                    f"generation_kwargs: until has {stop!r}, which no text has, since the special"
                    f" token {name!r} is left out of texts: give the text before it, or the token."
                )
        return texts, ends

    @functools.cached_property
    def _special_names(self) -> list[str]:
        """The names of the special tokens, the longest first."""
        added = self.tokenizer.encoder.spec()["added_tokens"]
        return sorted((row["content"] for row in added if row["special"]), key=len, reverse=True)
