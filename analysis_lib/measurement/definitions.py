"""What a metric is, as a hash: its parameters, and the code of its class where that is not the library's."""

import hashlib
import io
import pickle
import sys
import sysconfig
from functools import cached_property, partial, partialmethod
from pathlib import Path
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType

import numpy as np
from torch import Tensor

from analysis_lib.errors import AnalysisError
from analysis_lib.measurement.sources import NAME, code_hash
from analysis_lib.metrics.accumulator import Metric

# What Python writes into a class on its own.
_AUTOMATIC = {"__module__", "__doc__", "__dict__", "__weakref__", "__abstractmethods__", "_abc_impl", "__annotations__"}
_AUTOMATIC |= {"__dataclass_fields__", "__dataclass_params__"}
_INSTALLED = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
# In Python 3.11, the first constant of a function is its docstring, or None.
_OPTIMISED = 1


def definition_hash(metric: Metric) -> str:
    """The sha256 of a metric: its parameters, and the code of its class and of all that it uses of its author's.

    Docstrings, comments and the place of the code do not count. The library's own classes stand for themselves:
    their code is known by :func:`~analysis_lib.measurement.sources.source_hash`.

    Raises:
        AnalysisError: a parameter that has no lasting form, such as an open file.
    """
    parameters = {name: value for name, value in _state(metric).items() if name != "sums"}
    return hashlib.sha256(repr([_content(type(metric), ()), _content(parameters, ())]).encode()).hexdigest()


def is_own(module: str | None) -> bool:
    """Whether a module is the user's, as is what has none: not the library's, nor installed, nor Python's."""
    if (module or "").split(".")[0] in (NAME, *sys.builtin_module_names):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not any(Path(file).is_relative_to(folder) for folder in _INSTALLED)


def _content(value: object, within: tuple[int, ...]) -> object:
    """What a value consists of, as nested lists of texts; ``within`` are the definitions that it is part of."""
    if id(value) in within:
        return "itself"
    deeper = (*within, id(value))
    match value:
        case tuple() | list():
            return [type(value).__qualname__, *(_content(item, deeper) for item in value)]
        case set() | frozenset():
            return sorted(repr(_content(item, deeper)) for item in value)
        case dict():
            return sorted(repr([_content(key, deeper), _content(item, deeper)]) for key, item in value.items())
        case Tensor():
            return _content(value.detach().cpu().numpy(), within)
        case np.ndarray():
            return [str(value.dtype), str(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        case CodeType():
            documented = value.co_flags & _OPTIMISED and not value.co_name.startswith("<")
            constants = value.co_consts[1:] if documented else value.co_consts
            return [value.co_code.hex(), value.co_names, value.co_varnames, _content(constants, within)]
        case classmethod() | staticmethod() | property() | cached_property():
            parts = (getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel", "func"))
            return [type(value).__name__, *(_content(part, deeper) for part in parts)]
        case partial() | partialmethod():
            return _content([value.func, value.args, value.keywords], deeper)
        case MethodType():
            return _content([value.__func__, value.__self__], deeper)
        case ModuleType():
            if not is_own(value.__name__):
                return value.__name__
            parts = [part for part in vars(value).values() if is_own(_home(part)) and _home(part) != value.__name__]
            homes = {name: sys.modules.get(name) for name in map(_home, parts)}
            return [value.__name__, code_hash(Path(value.__file__)), _content(homes, deeper)]
        case FunctionType() if is_own(value.__module__):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            used = {name: value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__}
            parts = (value.__code__, value.__defaults__, value.__kwdefaults__, cells, used, vars(value))
            return [_content(part, deeper) for part in parts]
        case type() if is_own(value.__module__):
            attributes = {name: item for name, item in vars(value).items() if name not in _AUTOMATIC}
            return [value.__qualname__, *(_content(part, deeper) for part in (value.__bases__, attributes))]
        case _ if hasattr(value, "__wrapped__"):  # Such as by functools.cache.
            return [type(value).__qualname__, _content(value.__wrapped__, deeper)]
        case MemberDescriptorType() | GetSetDescriptorType():  # Of slots, whose values are with the instance.
            return value.__qualname__
        case _ if hasattr(value, "__qualname__"):
            return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
        case _ if is_own(type(value).__module__):
            return [_content(type(value), within), _content(_state(value), deeper)]
    return _pickled(value, deeper)


def _state(value: object) -> dict[str, object]:
    """The attributes of an object, those in slots among them."""
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    return {name: getattr(value, name, None) for name in slots} | getattr(value, "__dict__", {})


def _home(value: object) -> str:
    """The module that a value is from."""
    return value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or "builtins"


def _pickled(value: object, within: tuple[int, ...]) -> list:
    """What an object of another library consists of: as it is pickled, and what is in it of the author's own code."""
    found, written = [], io.BytesIO()

    class Follower(pickle.Pickler):
        def persistent_id(self, part: object) -> int | None:
            if part is value or not (isinstance(part, FunctionType | type) and is_own(part.__module__)):
                return None
            found.append(_content(part, within))
            return len(found)

    try:
        Follower(written).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise AnalysisError(
            f"a metric holds a {type(value).__name__}, by which what is kept cannot be known ({error}): "
            f"give it plain parameters, or measure without checkpoints"
        ) from error
    return [type(value).__qualname__, written.getvalue().hex(), found]


def _names(code: CodeType) -> set[str]:
    """The global names that code and the functions inside it mention."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))
