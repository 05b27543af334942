"""The type checker of the tests: as PEP 484 has it, an int will do where a float is wanted."""

import inspect
import typing
from collections.abc import Callable

import jaxtyping
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
_jaxtyped = jaxtyping.jaxtyped


def jaxtyped(*, typechecker: Callable) -> Callable:
    """The decorator of jaxtyping, which makes ready for shapes at every call, for those functions that name any.

    The others have their types checked by the type checker alone: a quarter of the tests' time on tiny models.
    """

    def decorated(given: object) -> object:
        if inspect.isfunction(given) and not any(map(_has_shapes, given.__annotations__.values())):
            return checked(given)
        return _jaxtyped(given, typechecker=typechecker)

    return decorated


def _has_shapes(annotation: object) -> bool:
    if isinstance(annotation, str):
        return True  # What stands in quotes may be anything.
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shapes, typing.get_args(annotation)))
