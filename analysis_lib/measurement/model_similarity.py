"""How alike two models represent a corpus: ``similarity("minilm", "mpnet", "wikipedia")``."""

import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from torch import nn

from analysis_lib.capture import Activations
from analysis_lib.capture.inputs import Reading, Settings
from analysis_lib.capture.paired import ModelPair, PairSource, common_level
from analysis_lib.corpora import Corpus, load_corpus
from analysis_lib.errors import AnalysisError, in_order, require_whole
from analysis_lib.measurement.execution import Workers
from analysis_lib.measurement.measuring import refuse_kind, stored_or_measured
from analysis_lib.measurement.tables import Tables
from analysis_lib.metrics.accumulator import GROUPS
from analysis_lib.metrics.representation_similarity import RepresentationSimilarity
from analysis_lib.models import LoadedModel, load_model

# Bytes of sums that are kept if no layers are chosen: those of all shards at work take as much
# again.
MOST_BYTES = 2**31
# Items from which the widths of layers are known.
FIRST_ITEMS = 2


def similarity(
    model: LoadedModel | str | Path | nn.Module,
    other: LoadedModel | str | Path | nn.Module,
    data: Corpus | str | Path | Iterable,
    *,
    metric: RepresentationSimilarity | None = None,
    special_tokens: bool = True,
    tokens_per_batch: int = Settings.tokens_per_batch,
    workers: int = 1,
    checkpoints: Path | str | None = None,
    progress: bool = True,
) -> Tables:
    """How alike the hidden states of two models are, in each pair of their layers.

    Both models read the corpus once, side by side. Vectors are compared by token where both read
    the same tokens; texts that they cut into other tokens are compared by word (what white space
    divides, the mean over its tokens), and images, sounds and texts without known words by item.
    ``run["compared_by"]`` says which.

    Args:
        model, other: from ``load_model``, or its arguments.
        data: from ``load_corpus``, or one of its arguments.
        metric: says which layers to compare. By default all, or as many evenly spaced ones as two
            gigabytes of sums allow, with a note: a pair of layers of width d takes 160 d² bytes.
        special_tokens: whether [CLS] and [SEP] count.
        tokens_per_batch, workers, checkpoints, progress: as in ``measure``.

    Returns:
        The table ``representation_similarity``, see
        :class:`~analysis_lib.metrics.representation_similarity.RepresentationSimilarity`.

    Raises:
        AnalysisError: the models read different kinds of items, or have no such layer.
    """
    started = time.monotonic()
    first, second = (
        each if isinstance(each, LoadedModel) else load_model(each) for each in (model, other)
    )
    corpus = load_corpus(data)
    settings = Settings(special_tokens, tokens_per_batch=tokens_per_batch)
    refuse_kind(first.name, first.layout, corpus)
    source = PairSource(ModelPair(first, second, common_level(first, second, corpus.items)))
    source.refuse_unreadable(corpus.items)
    source.unsupported(corpus.items, settings)
    widths = _widths(source, corpus, settings)
    metric = metric or RepresentationSimilarity()
    chosen = _chosen_layers(source, widths, metric.chosen_layers, metric.other_layers)
    metric = RepresentationSimilarity(*chosen)
    work = (Workers(workers), checkpoints, progress, started)
    tables = stored_or_measured(source, corpus, [metric], settings, {}, *work)
    tables.run["compared_with"] = second.name
    tables.run["compared_by"] = source.model.level
    return tables


# Width of each layer of the first model, and of the other.
Widths = tuple[dict[int, int], dict[int, int]]


def _widths(source: PairSource, corpus: Corpus, settings: Settings) -> Widths:
    """The widths of the layers, from a pass of a few items."""
    own = {}
    other = {}

    def receive(activations: Activations) -> None:
        own[activations.layer] = activations.spaces["hidden"].values.shape[-1]
        for layer, vectors in activations.beside.items():
            other[layer] = vectors.values.shape[-1]

    items = corpus.items[:FIRST_ITEMS]
    for batch in source.batches(items, [0] * len(items), settings, Reading()):
        source.run(batch, frozenset(), receive)
    return own, other


def _chosen_layers(
    source: PairSource,
    widths: Widths,
    layers: Sequence[int] | None,
    other_layers: Sequence[int] | None,
) -> tuple[list[int], list[int]]:
    """The layers to compare, of each model.

    Raises:
        AnalysisError: a model has no such layer.
    """
    pair = source.model
    given = ((pair.first, layers), (pair.other, other_layers))
    chosen = []
    for (model, wanted), known in zip(given, widths, strict=True):
        if wanted is not None:
            wanted = _known_layers(model, wanted, known)
        chosen.append(wanted)
    most = max(map(len, widths))
    for count in range(most, 1, -1):
        some = []
        for wanted, known in zip(chosen, widths, strict=True):
            some.append(wanted or _spaced(sorted(known), count))
        if None not in chosen or _bytes(some, widths) <= MOST_BYTES:
            break
    if count < most:
        compared = " and ".join(
            f"{len(few)} of {len(all)}" for few, all in zip(some, widths, strict=True)
        )
        logging.getLogger(__name__).warning(
            "note: %s: %s layers are compared, since the sums of all exceed two gigabytes: choose "
            "others by RepresentationSimilarity(layers, other_layers)",
            pair.name,
            compared,
        )
    return some[0], some[1]


def _known_layers(model: LoadedModel, wanted: Sequence[int], known: dict[int, int]) -> list[int]:
    layers = [
        require_whole("a layer", layer)
        for layer in in_order("layers", wanted, "their numbers in a list")
    ]
    for layer in layers:
        if layer not in known:
            raise AnalysisError(
                f"{model.name} has no layer {layer} to compare: give some of 0 to {max(known)}"
            )
    if not layers:
        raise AnalysisError("layers is empty: give the numbers of some, or leave it out")
    return sorted({*layers})


def _spaced(layers: list[int], count: int) -> list[int]:
    """``count`` of the layers at even distances, with the first and the last."""
    count = min(count, len(layers))
    steps = np.linspace(0, len(layers) - 1, count).round().astype(int)
    return [layers[step] for step in steps]


def _bytes(chosen: list[list[int]], widths: Widths) -> int:
    """Size of the sums of all jackknife groups."""
    own, other = chosen
    of_own = sum(widths[0][layer] for layer in own)
    of_other = sum(widths[1][layer] for layer in other)
    return 8 * GROUPS * of_own * of_other
