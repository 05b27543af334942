"""Calls of modules: their arguments by name, and the vectors in their inputs and outputs."""

import copy
import inspect
from collections.abc import Mapping
from functools import cache

from torch import Tensor, nn


def first_vectors(values: object) -> Tensor | None:
    """The first floating-point tensor in nested values: the input or output vectors of a block."""
    if isinstance(values, Tensor):
        return values if values.is_floating_point() and values.dim() >= 2 else None
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return None
    for value in values:
        vectors = first_vectors(value)
        if vectors is not None:
            return vectors
    return None


def first_of_call(args: tuple, kwargs: Mapping[str, object]) -> Tensor | None:
    """The vectors that a module is called with."""
    vectors = first_vectors(args)
    return first_vectors(kwargs) if vectors is None else vectors


def with_first(values: object, vectors: Tensor) -> object:
    """Nested values with other vectors in place of their :func:`first_vectors`."""
    if isinstance(values, Tensor):
        return vectors
    if isinstance(values, Mapping):
        name = next(name for name, value in values.items() if first_vectors(value) is not None)
        changed = copy.copy(values)
        changed[name] = with_first(values[name], vectors)
        return changed
    index = next(index for index, value in enumerate(values) if first_vectors(value) is not None)
    changed = [*values[:index], with_first(values[index], vectors), *values[index + 1 :]]
    is_named = hasattr(values, "_fields")
    return type(values)(*changed) if is_named else type(values)(changed)


def call_with_first(args: tuple, kwargs: dict, vectors: Tensor) -> tuple[tuple, dict]:
    """The arguments of a call with other vectors in place of :func:`first_of_call`."""
    if first_vectors(args) is None:
        return args, with_first(kwargs, vectors)
    return with_first(args, vectors), kwargs


def arguments_of(module: nn.Module, args: tuple, kwargs: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a call of a module by name."""
    arguments = signature_of(type(module)).bind_partial(module, *args, **kwargs).arguments
    arguments.pop("self", None)
    return {**arguments, **arguments.pop("kwargs", {})}


@cache
def signature_of(module: type[nn.Module]) -> inspect.Signature:
    """The signature of the forward pass of a class of modules, with ``self``."""
    return inspect.signature(module.forward)


def angles_of(arguments: Mapping[str, object]) -> tuple[Tensor, ...]:
    """Angles in an attention module's arguments: cosines and sines, complex numbers, or none."""
    angles = arguments.get("position_embeddings")
    if isinstance(angles, Tensor):
        return (angles,) if angles.is_complex() else ()
    is_pair = isinstance(angles, tuple | list) and len(angles) == 2
    return tuple(angles) if is_pair else ()
