"""Types of tokens: the names in table order, and those that a corpus has."""

# Types of tokens around a text or a picture: whether they count is a setting.
SPECIAL_TYPES = ("cls", "sep", "register", "detection", "image_special", "template")
# Types of the tokens of a text or an image: those of Maruta and Matsuzaki (2024, sec. 2.2);
# registers and detection tokens of vision transformers; and a first token that is no [CLS], which
# causal models use as a sink of attention.
TOKEN_TYPES = ("cls", "sep", "register", "detection", "first", "punct", "other")
# Roles of the messages of a conversation, which are types of their tokens.
ROLES = ("system", "user", "assistant", "tool")
# Types of the tokens of a conversation: its first token; what the template adds; the messages.
CONVERSATION_TYPES = ("template", "first", *ROLES, "other")
# Types of the tokens of a prompt and of the answer to it.
ANSWER_TYPES = ("first", "prompt", "answer", "other")
# Types of the tokens of an image or a sound with its text: ``image`` and ``sound`` are those that
# features replace, ``image_special`` those that begin, divide or end an image or a sound.
PAIR_TYPES = (
    *("cls", "sep", "register", "detection", "image_special"),
    *("first", "image", "sound", "punct", "other"),
)
# Every type, in table order.
ALL_TYPES = (
    *SPECIAL_TYPES,
    *("first", "image", "sound", *ROLES, "prompt", "answer", "punct", "other"),
)


def special_count(types: tuple[str, ...]) -> int:
    """The number of special types, which are the first of all."""
    return len([name for name in types if name in SPECIAL_TYPES])
