"""Pairs of preferences: a prompt and two completions of it, all of them texts or all messages."""

import json

from jaxformer.data.sources.error_policy import RecordError
from jaxformer.data.sources.records import Record, Value
from jaxformer.tokenizer.messages import ASSISTANT


def one_pair(prompt: Value, *sides: Value) -> Record:
    """A prompt and the completions of it. Of messages the prompt is those before the answers, and a
    completion is the one message that answers it.

    Where the prompt is no messages (a text, or missing), the sides are whole conversations that
    differ in their last message. Texts stay as they are. Raises RecordError.
    """
    texts = [isinstance(side, str) for side in sides]
    if all(texts):
        if isinstance(prompt, str):
            return prompt, *sides
        told = "is a list of messages" if prompt else "is missing"
        raise _no_pair(
            f"the prompt {told}, and chosen and rejected are strings: give all three as strings, or"
            " all as messages"
        )
    if any(texts):
        raise _no_pair("one of chosen and rejected is a string, the other a list of messages")
    whole = [side if isinstance(prompt, str) or not prompt else (*prompt, *side) for side in sides]
    before = [messages[:-1] for messages in whole]
    if before[0] != before[1]:
        raise _no_pair(
            "the conversations differ before their last message: both have to answer one prompt"
        )
    for name, messages in zip(("chosen", "rejected"), whole, strict=True):
        answer = json.loads(messages[-1])
        if answer["role"] != ASSISTANT:
            raise _no_pair(f"the last message of {name} has the role {answer['role']!r}")
        if not answer.get("content", "").strip() and not answer.get("tool_calls"):
            raise _no_pair(f"the last message of {name} is empty")
    if not before[0]:
        raise _no_pair("nothing is before the answers: give the messages of the prompt")
    return before[0], *(messages[-1:] for messages in whole)


def _no_pair(told: str) -> RecordError:
    return RecordError(
        "records whose messages are no pair",
        f": {told}. Each side ends with one message of the role {ASSISTANT!r}, after the messages"
        " of the prompt.",
    )
