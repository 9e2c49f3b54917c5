"""Conversations: lists of messages, each with a role and a content."""

from collections.abc import Mapping
from typing import Any

from jaxformer.files import ConfigError

Message = dict[str, Any]

ASSISTANT = "assistant"  # the role whose turns are learned
SHAPE = 'a list of messages as [{"role": "user", "content": "..."}, ...]'


def checked_messages(value: Any) -> list[Message]:
    """The messages of a conversation, each of which has a role and a text. Keys whose value is null
    are left out, since Parquet and Arrow cannot tell them from missing ones.

    A message with tool_calls may lack its content."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{_shown(value)} is no conversation: give {SHAPE}")
    if not value:
        raise ConfigError(f"the conversation has no messages: give {SHAPE}")
    return [_checked(message, f"message {number}") for number, message in enumerate(value, 1)]


def require_assistant(messages: list[Message]) -> None:
    """Raises ConfigError for a conversation in which the assistant has no turn."""
    roles = [message["role"] for message in messages]
    if ASSISTANT not in roles:
        raise ConfigError(
            f"no message has the role {ASSISTANT!r} (the roles are {', '.join(map(repr, roles))}),"
            " so there is nothing to learn: only the turns of that role are learned"
        )


def _checked(message: Any, where: str) -> Message:
    """A message without the keys whose value is null."""
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where} is {_shown(message)}: give {SHAPE}")
    entries = {str(key): entry for key, entry in message.items() if entry is not None}
    if not isinstance(entries.get("role"), str):
        keys = ", ".join(map(repr, message)) or "none"
        raise ConfigError(f'{where} has no "role" that is a string (its keys are {keys}): {SHAPE}')
    content = entries.get("content")
    if isinstance(content, list):
        raise ConfigError(
            f"{where}: its content is a list, as of parts with images: only text is read, so join"
            " its texts to one string"
        )
    if content is None and not entries.get("tool_calls"):
        raise ConfigError(f"{where} has no content: the content is a string")
    if content is not None and not isinstance(content, str):
        raise ConfigError(
            f"{where} has a content that is {_shown(content)}: the content is a string"
        )
    return entries


def _shown(value: Any) -> str:
    return f"{type(value).__name__} ({str(value)[:40]!r})"
