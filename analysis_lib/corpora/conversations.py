"""Conversations, and prompts with their answers, as items of a corpus."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from analysis_lib.corpora.token_types import ROLES
from analysis_lib.errors import AnalysisError, require_whole, shown

# Other names of roles, and what they are here.
_SAME_ROLES = {"developer": "system", "function": "tool", "ipython": "tool"}


@dataclass(frozen=True)
class Conversation:
    """Messages that a chat template turns into one text.

    Attributes:
        stored: the messages as JSON, in the order of the conversation.
    """

    stored: str

    @classmethod
    def of(cls, name: str, messages: Iterable[Mapping]) -> "Conversation":
        """The conversation of some messages, each with ``role`` and ``content``.

        Args:
            name: what the messages are, for errors.

        Raises:
            AnalysisError: a message without role or content, or an unknown role.
        """
        checked = [_checked(name, number, each) for number, each in enumerate(messages, 1)]
        return cls(json.dumps(checked, ensure_ascii=False))

    @property
    def messages(self) -> list[dict]:
        """The messages, each with ``role`` and ``content``, and what else they have."""
        return json.loads(self.stored)

    @property
    def roles(self) -> list[str]:
        """The role of each message, of ``ROLES``."""
        return [role_of(message) for message in self.messages]

    @property
    def texts(self) -> tuple[str, ...]:
        """The content of each message."""
        return tuple(message["content"] or "" for message in self.messages)


def is_messages(cell: object) -> bool:
    """Whether a cell of a table holds messages: a list of dictionaries."""
    if isinstance(cell, str | bytes | Mapping) or not isinstance(cell, Iterable):
        return False
    return any(isinstance(each, Mapping) for each in cell)


def role_of(message: Mapping) -> str | None:
    """The role of a message, of ``ROLES``; None for an unknown one."""
    role = message.get("role")
    role = _SAME_ROLES.get(role, role)
    return role if role in ROLES else None


def _checked(name: str, number: int, message: object) -> dict:
    name = f"{name}: message {number}"
    if not isinstance(message, Mapping):
        raise AnalysisError(f"{name} is {shown(message)}: give its role and content")
    # A table fills in what a message lacks.
    message = {key: value for key, value in message.items() if value is not None}
    if role_of(message) is None:
        given = shown(message.get("role"))
        raise AnalysisError(f"{name} has the role {given}: give one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and "tool_calls" in message:
        content = ""
    message["content"] = _text(name, content)
    try:
        json.dumps(message)
    except TypeError as error:
        raise AnalysisError(f"{name} is no JSON ({error}): give texts and numbers") from error
    return message


def _text(name: str, content: object) -> str:
    """The text of a content, which may be given as parts."""
    if isinstance(content, str):
        return content
    if content is None:
        raise AnalysisError(f"{name} has no content: the conversation ends there; complete it")
    texts = []
    for part in _parts(name, content):
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise AnalysisError(f"{name} holds {shown(part)}: give texts alone")
        texts.append(part["text"])
    return "".join(texts)


def _parts(name: str, content: object) -> Iterable:
    if isinstance(content, Mapping) or not isinstance(content, Iterable):
        raise AnalysisError(f"{name} has the content {shown(content)}: give a text")
    return content


@dataclass(frozen=True)
class Answered:
    """A prompt and the answer to it.

    Attributes:
        prompt: the text of the prompt.
        answer: the text of the answer.
        prompt_ids: the tokens of the prompt as the model read them; empty if not known.
        answer_ids: the tokens of the answer as the model wrote them.
    """

    prompt: str
    answer: str
    prompt_ids: tuple[int, ...] = ()
    answer_ids: tuple[int, ...] = ()

    @property
    def texts(self) -> tuple[str, str]:
        """The prompt and the answer."""
        return self.prompt, self.answer

    @classmethod
    def of(
        cls,
        name: str,
        prompt: object,
        answer: object,
        prompt_ids: object = None,
        answer_ids: object = None,
    ) -> "Answered":
        """A prompt and its answer from the cells of a table.

        Args:
            name: what the row is, for errors.

        Raises:
            AnalysisError: a cell of another type, or an answer without a token.
        """
        for column, cell in (("prompt", prompt), ("answer", answer)):
            if not isinstance(cell, str):
                raise AnalysisError(f"{name}: its {column} is {shown(cell)}: give a text")
        ids = [_ids(name, prompt_ids), _ids(name, answer_ids)]
        if bool(ids[0]) != bool(ids[1]) and answer:
            raise AnalysisError(
                f"{name} has the tokens of the prompt or of the answer alone: give both, or neither"
            )
        if not answer and not ids[1]:
            raise AnalysisError(f"{name} has an answer without a token: leave it out")
        return cls(prompt, answer, *ids)


def _ids(name: str, cell: object) -> tuple[int, ...]:
    if cell is None:
        return ()
    if isinstance(cell, str | bytes | Mapping) or not isinstance(cell, Iterable):
        raise AnalysisError(f"{name}: its tokens are {shown(cell)}: give a list of whole numbers")
    return tuple(require_whole(f"{name}: one of its tokens", number) for number in cell)
