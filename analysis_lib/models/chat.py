"""Conversations and answers as a model reads them, with the type of each token.

A chat template turns the messages of a conversation into one text. Which letters of it are those of
a message is found by rendering the conversation once more with that message exchanged: what differs
is the message, and what stays comes from the template. Masks that templates can give
(``return_assistant_tokens_mask``) are not used: most templates do not make them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, takewhile

from analysis_lib.corpora import Answered, Conversation
from analysis_lib.corpora.conversations import role_of
from analysis_lib.corpora.token_types import ANSWER_TYPES, CONVERSATION_TYPES
from analysis_lib.errors import AnalysisError
from analysis_lib.models.tokenization import Encoded, Tokenizer, readable

# Stands in for the content of a message: a letter for private use, which no text should hold.
_STAND_IN = "\ue0f8"


def conversations(
    name: str,
    tokenizer: Tokenizer,
    items: Sequence[Conversation],
    template: str | None = None,
    answering: bool = False,
) -> Iterator[Encoded]:
    """The tokens of conversations, as ``tokenizer.apply_chat_template`` makes them, with types.

    Args:
        name: the name of the model, for errors.
        template: a chat template in place of the tokenizer's.
        answering: whether the text ends where an answer of the assistant begins; its tokens are
            then all of the type ``template``, but for the first.

    Raises:
        AnalysisError: the tokenizer has no chat template or shows no letters of its tokens; or the
            template refuses a conversation.
    """
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise AnalysisError(
            f"{name}: its tokenizer has no chat template: give one (--chat-template FILE, or "
            "chat_template= in Python), or texts in place of conversations"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise AnalysisError(
            f"{name}: its {type(tokenizer).__name__} does not say which letters a token stands "
            "for: give a fast tokenizer"
        )
    for item in items:
        messages = item.messages
        render = partial(
            rendered,
            name,
            tokenizer,
            chat_template=template,
            add_generation_prompt=answering,
        )
        text = render(messages)
        # Whose the tokens of a prompt are does not matter to its answer.
        parts = [] if answering else _parts(messages, text, render)
        yield _typed(name, tokenizer, text, parts)


def rendered(name: str, tokenizer: Tokenizer, messages: list[dict], **settings: object) -> str:
    """The text that the chat template makes of messages.

    Args:
        settings: further arguments of ``apply_chat_template``.

    Raises:
        AnalysisError: the template refuses them.
    """
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    except Exception as error:  # A template is a program, which can raise any error.
        fault = " ".join(str(error).split()) or type(error).__name__
        template = "its chat template"
        remedy = "mend the conversation, or give another template (--chat-template FILE)"
        if settings.get("chat_template") is not None:
            template = "the chat template that was given"
            remedy = "mend either"
        if line := getattr(error, "lineno", None):
            raise AnalysisError(
                f"{name}: {template} is no Jinja ({fault}, line {line}): mend it"
            ) from error
        roles = ", ".join(message["role"] for message in messages)
        raise AnalysisError(
            f"{name}: {template} refuses a conversation of {roles} ({fault}): {remedy}"
        ) from error


def _parts(
    messages: list[dict], text: str, render: Callable[[list[dict]], str]
) -> list[tuple[slice, int]]:
    """The letters of each message in the text of a conversation, and the type of its tokens."""
    parts = []
    for index, message in enumerate(messages):
        exchanged = {"role": message["role"], "content": _STAND_IN}
        for key in ("name", "tool_call_id"):
            if key in message:
                exchanged[key] = message[key]
        others = [*messages[:index], exchanged, *messages[index + 1 :]]
        part = _difference(text, render(others))
        parts.append((part, CONVERSATION_TYPES.index(role_of(message))))
    return parts


def _difference(text: str, other: str) -> slice:
    """The part of a text that another text, the same before and after it, does not have.

    >>> _difference("<user> hello <end>", "<user> X <end>")
    slice(7, 12, None)
    """
    start = _common(text, other)
    after = _common(text[start:][::-1], other[start:][::-1])
    return slice(start, len(text) - after)


def _common(text: str, other: str) -> int:
    """The number of letters at the beginning of both texts that are the same."""
    pairs = zip(text, other, strict=False)
    return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])


def _typed(name: str, tokenizer: Tokenizer, text: str, roles: list[tuple[slice, int]]) -> Encoded:
    """The tokens of a rendered conversation: a token with a letter of a message has its role."""
    kinds = [CONVERSATION_TYPES.index("template")] * len(text)
    for part, kind in roles:
        kinds[part] = [kind] * (part.stop - part.start)
    with readable(name):
        columns = dict(tokenizer(text, add_special_tokens=False, return_offsets_mapping=True))
    types = []
    for start, stop in columns.pop("offset_mapping"):
        # The template is the first type.
        types.append(max(kinds[start:stop], default=CONVERSATION_TYPES.index("template")))
    types[:1] = [CONVERSATION_TYPES.index("first")]
    return _unframed(columns, types, CONVERSATION_TYPES)


def answers(
    name: str, tokenizer: Tokenizer, items: Sequence[Answered], words: float = math.inf
) -> Iterator[Encoded]:
    """The tokens of prompts with their answers, with types.

    Tokens that an item brings are read as they are, since the text of an answer need not give the
    tokens that a model has written. Without them, the answer follows the prompt, and what the
    tokenizer puts before the prompt is part of that.

    Args:
        name: the name of the model, for errors.
        words: how many tokens the model has vectors of.

    Raises:
        AnalysisError: the tokens of an item are not those of this tokenizer.
    """
    for item in items:
        ids = item.prompt_ids, item.answer_ids
        if not item.answer_ids:
            ids = _tokenised(name, tokenizer, item)
        else:
            _refuse_foreign(name, tokenizer, item, words)
        prompt, answer = map(len, ids)
        types = ["first"] + ["prompt"] * (prompt - 1) + ["answer"] * answer
        numbers = [ANSWER_TYPES.index(kind) for kind in types]
        yield _unframed({"input_ids": [*chain(*ids)]}, numbers, ANSWER_TYPES)


def _tokenised(
    name: str, tokenizer: Tokenizer, item: Answered
) -> tuple[Sequence[int], Sequence[int]]:
    with readable(name):
        prompt = tokenizer(item.prompt, return_special_tokens_mask=True)
        answer = tokenizer(item.answer, add_special_tokens=False)["input_ids"]
    special = prompt["special_tokens_mask"]
    body = Encoded({"input_ids": prompt["input_ids"]}, [*map(bool, special)]).body
    return prompt["input_ids"][: body.stop], answer


def _refuse_foreign(name: str, tokenizer: Tokenizer, item: Answered, words: float) -> None:
    strange = [index for index in chain(item.prompt_ids, item.answer_ids) if index >= words]
    if strange:
        raise AnalysisError(
            f"{name} has {words} tokens, and the answer {item.answer[:30]!r} comes with token "
            f"{strange[0]}: give the model that wrote it, or leave the columns of tokens out"
        )
    with readable(name):
        spelt = tokenizer.decode(item.answer_ids, skip_special_tokens=True)
    if spelt.strip() != item.answer.strip():
        raise AnalysisError(
            f"{name}: the tokens of an answer spell {spelt[:30]!r} here, and the answer is "
            f"{item.answer[:30]!r}: give the model that wrote it, or leave the column of tokens out"
        )


def _unframed(
    columns: Mapping[str, Sequence], types: list[int], type_names: tuple[str, ...]
) -> Encoded:
    """Tokens of which none frames a text."""
    kept = {key: values for key, values in columns.items() if key != "attention_mask"}
    return Encoded(kept, [False] * len(types), types, type_names)
