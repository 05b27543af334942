"""Identity of measurements: versions of formulas, and a hash of the library.

A formula has a version: ``capture.VERSION`` for how activations are read, ``intervals.VERSION`` for
intervals, and ``Metric.version`` for each table. Raise it in the commit that changes numbers:
shipped tables with another version are then recorded anew (``make record``). An edit that changes
no number leaves shipped tables valid.

Results kept on this machine also depend on :func:`analysis_lib.store.library_hash`: any edit of the
library measures anew.
"""

import inspect
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import joblib

from analysis_lib import capture
from analysis_lib.errors import AnalysisError
from analysis_lib.metrics import intervals
from analysis_lib.metrics.accumulator import Metric

# The package of the library.
NAME = Path(__file__).parents[1].name
IDENTIFIER = re.compile(r"\b[A-Za-z_]\w*\b")


def formulas(metrics: Iterable[Metric]) -> dict[str, object]:
    """The versions that the tables of some metrics depend on, as in ``run.json``.

    Returns:
        The versions ``capture`` and ``intervals``; and under ``metrics``, by name, ``version`` and
        ``parameters``.

    >>> from analysis_lib.metrics import Isotropy
    >>> formulas([Isotropy(["query"])])["metrics"]["isotropy"]["parameters"]
    {'needs': ['query']}
    """
    by_metric = {}
    for metric in metrics:
        by_metric[metric.name] = {
            "version": metric.version,
            "parameters": readable_parameters(metric),
        }
    return {"capture": capture.VERSION, "intervals": intervals.VERSION, "metrics": by_metric}


def is_current(run: Mapping[str, Any], today: Mapping[str, Any]) -> bool:
    """Whether every version under which a run was recorded is still current.

    A recording without the entry ``intervals`` has no table with intervals.

    Args:
        run: the content of its file, of which ``formulas`` is read.
        today: the result of :func:`formulas`, with any other versions behind the tables.
    """
    recorded = run.get("formulas", {})
    return bool(recorded) and _versions(recorded).items() <= _versions(today).items()


def _versions(recorded: Mapping[str, Any]) -> dict[str, int]:
    """The versions without parameters, by name."""
    versions = {name: version for name, version in recorded.items() if name != "metrics"}
    for name, of_metric in recorded.get("metrics", {}).items():
        versions[f"metric {name}"] = of_metric["version"]
    return versions


def metric_identity(metric: Metric) -> list[str]:
    """Identity of a metric: name, version, parameters, and the source of a user's own metric.

    Raises:
        AnalysisError: a parameter or a class that cannot be hashed, such as an open file.
    """
    parameters = _hash_of(_parameters(metric), metric)
    return [metric.name, str(metric.version), parameters, *_own_texts(type(metric))]


def readable_parameters(metric: Metric) -> dict[str, object]:
    """The parameters of a metric in JSON types; others are replaced by their hash."""
    readable = {}
    for name, value in _parameters(metric).items():
        if isinstance(value, set | frozenset | list | tuple):
            value = sorted(map(str, value))
        elif not isinstance(value, str | int | float | bool | None):
            value = _hash_of(value, metric)
        readable[name] = value
    return readable


# The types of tokens are those of the corpus.
_NO_PARAMETERS = {"sums", "types"}


def _parameters(metric: Metric) -> dict[str, object]:
    return {name: value for name, value in vars(metric).items() if name not in _NO_PARAMETERS}


def _hash_of(value: object, metric: Metric) -> str:
    try:
        return joblib.hash(_without_order(value), hash_name="sha1")
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise AnalysisError(
            f"the metric {metric.name} holds what cannot be pickled ({error}), so that its sums "
            "cannot be kept: give it plain parameters, or measure without checkpoints"
        ) from error


def _without_order(value: object) -> object:
    """The same value with sets in place of frozen sets.

    joblib hashes the members of a set in a fixed order, and those of a frozen set as they come,
    which is another order in another process.
    """
    if isinstance(value, frozenset):
        return set(value)
    if isinstance(value, dict):
        return {name: _without_order(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_order, value))
    return value


def _own_texts(kind: type) -> list[str]:
    """The source of a user's metric and of its bases, up to the classes of the library.

    For a class in a file it is the whole file. For one that was written in a notebook, it is that
    of its methods and of the names they use there.
    """
    texts = []
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in (NAME, "builtins", "abc"):
            continue
        try:
            texts.append(Path(inspect.getfile(base)).read_text(encoding="utf-8"))
        except (OSError, TypeError):
            texts += _texts_in_notebook(base)
    return texts


def _texts_in_notebook(kind: type) -> list[str]:
    texts: dict[str, str] = {}
    waiting = [kind]
    while waiting:
        definition = waiting.pop()
        if definition.__qualname__ in texts:
            continue
        methods, attributes = _parts_of(definition)
        texts[definition.__qualname__] = joblib.hash(_without_order(attributes), hash_name="sha1")
        for method in methods:
            text = _text_of(method, kind)
            texts[definition.__qualname__] += text
            for name in IDENTIFIER.findall(text):
                value = method.__globals__.get(name)
                if isinstance(value, FunctionType | type):
                    if value.__module__ == kind.__module__:
                        waiting.append(value)
                elif isinstance(value, str | int | float | bool | tuple | list | dict):
                    texts[name] = repr(value)
    return [f"{name}: {texts[name]}" for name in sorted(texts)]


def _parts_of(definition: type | FunctionType) -> tuple[list[FunctionType], dict[str, object]]:
    """Functions of a class, and its other attributes; for a function, itself."""
    if isinstance(definition, FunctionType):
        return [inspect.unwrap(definition)], {}
    methods = []
    attributes = {}
    for name, value in vars(definition).items():
        function = getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            methods.append(inspect.unwrap(function))
        elif not name.startswith("__") and not name.startswith("_abc"):
            attributes[name] = repr(value)
    return methods, attributes


def _text_of(function: FunctionType, kind: type) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError) as error:
        raise AnalysisError(
            f"the metric {kind.__name__} has no source that can be read, so that its sums cannot "
            "be kept: put it into a file, or measure without checkpoints"
        ) from error
