"""The type checker of the tests: as PEP 484 has it, an int will do where a float is wanted."""

import functools
import inspect
import typing
from collections.abc import Callable

import jaxtyping
import numpy as np
import torch
from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
_jaxtyped = jaxtyping.jaxtyped


def jaxtyped(*, typechecker: Callable) -> Callable:
    """The decorator of jaxtyping, for those functions whose annotations name any shapes.

    To make ready for shapes and to compare them takes longer than much of what is computed on tiny
    models: a function is checked whenever it is called with tensors of other shapes or types than
    before. Functions without shapes have their types checked by the type checker alone; those
    inside others, which are made anew at every call, by nothing.
    """

    def decorated(given: object) -> object:
        if not inspect.isfunction(given):
            return _jaxtyped(given, typechecker=typechecker)
        if "<locals>" in given.__qualname__:
            return given
        if not any(map(_has_shapes, given.__annotations__.values())):
            return checked(given)
        return _once_for_each_look(given, _jaxtyped(given, typechecker=typechecker))

    return decorated


def _has_shapes(annotation: object) -> bool:
    if isinstance(annotation, str):
        return True  # What stands in quotes may be anything.
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shapes, typing.get_args(annotation)))


def _once_for_each_look(plain: Callable, strict: Callable) -> Callable:
    seen = set()

    @functools.wraps(plain)
    def called(*args: object, **kwargs: object) -> object:
        with torch._C.DisableTorchFunction():
            look = (*map(_look, args), *kwargs, *map(_look, kwargs.values()))
        if look in seen:
            return plain(*args, **kwargs)
        found = strict(*args, **kwargs)
        seen.add(look)
        return found

    return called


def _look(value: object) -> object:
    return (
        (type(value), value.dtype, value.shape)
        if isinstance(value, torch.Tensor | np.ndarray)
        else type(value)
    )
