"""The arguments that are rules of a token or settings of a beam search, and the keywords of
`jf.generate` and `jf.beam_search` that they stand for."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import tyro

OptionalFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT")]
AnyTexts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT ...")]


@dataclass(frozen=True, kw_only=True)
class RuleArguments:
    """What is not given is as generation_config.json of the model says, or off."""

    min_p: OptionalFloat = None
    """Sample from tokens with at least this share of the largest probability."""
    typical_p: OptionalFloat = None
    """Sample from the tokens of most typical information whose probabilities add up to this."""
    repetition_penalty: OptionalFloat = None
    """Divide the logits of tokens of the text and the prompt by this, where they are above 0, and
    multiply them with it below 0; if not given, as the files of the model say."""
    presence_penalty: OptionalFloat = None
    """Subtract this from the logits of every token that was written."""
    frequency_penalty: OptionalFloat = None
    """Subtract this from the logits of a token each time that it was written."""
    no_repeat_ngram_size: OptionalInt = None
    """Write no sequence of so many tokens twice; if not given, as the files of the model say."""
    min_new_tokens: OptionalInt = None
    """Write no end token before so many tokens; if not given, as the files of the model say."""
    bad_words: AnyTexts = ()
    """Texts that are not written, each as the tokenizer encodes it, also after a space."""
    stop_strings: AnyTexts = ()
    """End the text before the first of these texts."""

    def rules(self, encode: Callable[[str], list[int]]) -> dict[str, Any]:
        """The rules that are given, as keywords of `jf.generate`; `encode` gives the tokens of a
        text. stop_strings need a tokenizer beside them."""
        names = [field.name for field in fields(RuleArguments)]
        values = {name: getattr(self, name) for name in names}
        rules = {name: value for name, value in values.items() if value not in (None, ())}
        if self.bad_words:
            spellings = [text for word in self.bad_words for text in (word, f" {word}")]
            rules["bad_words"] = tuple(dict.fromkeys(tuple(encode(text)) for text in spellings))
        return rules


@dataclass(frozen=True, kw_only=True)
class SearchArguments(RuleArguments):
    """The settings of a beam search beside its width."""

    length_penalty: float = 0.6
    """Length penalty of the beam search; 0 prefers short texts."""
    length_divisor: Literal["gnmt", "tokens"] = "gnmt"
    """What the length penalty is a power of: (5 + tokens) / 6, or tokens, as in transformers."""
    early_stopping: Literal["never", "on", "off"] = "never"
    """When a beam search with as many finished texts as beams ends: never before the best texts are
    certain, at once (on), or when no unfinished text would win if it ended here (off)."""

    def search(self) -> dict[str, Any]:
        """These settings, as keywords of `jf.beam_search`."""
        early = {"never": "never", "on": True, "off": False}[self.early_stopping]
        return {
            "length_penalty": self.length_penalty,
            "length_divisor": self.length_divisor,
            "early_stopping": early,
        }
