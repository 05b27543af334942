"""Queries, keys, sinks and losses along texts, up to twice the length of those of training.

Wertheimer et al. 2026 see two clouds, of queries and of keys, that longer texts mix.
"""

import time
from collections.abc import Mapping

import numpy as np
import pandas as pd
from jaxtyping import Float

from analysis_lib import load_corpus, load_model, measure, metrics
from analysis_lib.corpora import Corpus
from analysis_lib.errors import AnalysisError, require_whole
from analysis_lib.measurement import grouped, shipped
from analysis_lib.measurement.versions import formulas, is_current
from analysis_lib.models import LoadedModel
from analysis_lib.models.loading import lacks_head, revision_of

# The folder of ``data/measurements``.
RECORDED = "lengths"
LOSS = metrics.NextTokenLoss(bins="position")
METRICS = (
    metrics.HeadMeans(bins="position"),
    metrics.MeanVector(bins="position"),
    metrics.AttentionByTokenType(bins="position"),
    LOSS,
)
# By what is done to queries and keys, the endings of their spaces.
ROTATIONS = {"before": "_unrotated", "after": ""}
# From an eighth of the trained length to twice that.
DOUBLINGS = range(-3, 2)


def longest_texts(data: str, limit: int) -> Corpus:
    """The longest texts of a corpus, in which those of one unit, such as an article, are joined."""
    parts = load_corpus(data)
    units = [*map(str, range(len(parts)))] if parts.units is None else parts.units
    texts = pd.Series(parts.texts).groupby(pd.Series(units), sort=False).agg(" ".join)
    longest = texts.str.len().nlargest(limit).index
    return Corpus(data, [*texts[longest]], units=[*longest])


def lengths_for(trained: int) -> list[int]:
    """The lengths that are compared: each is twice the one before, the last but one is ``trained``.

    Raises:
        AnalysisError: no power of two, which bins of positions end at, or too small a one.

    >>> lengths_for(64)
    [8, 16, 32, 64, 128]
    """
    trained = require_whole("the trained length", trained, 8)
    if trained.bit_count() > 1:
        raise AnalysisError(
            f"the trained length is {trained}, and bins of positions end at powers of two: give "
            f"the last one that the model was trained on, such as {2 ** (trained.bit_length() - 1)}"
        )
    return [int(trained * 2.0**doubling) for doubling in DOUBLINGS]


def read(model: str, corpus: Corpus, trained: int) -> Mapping[str, pd.DataFrame]:
    """The tables of :func:`measured`: those that come with the book, if they are of the same."""
    recorded = shipped(RECORDED)
    if _is_of(recorded.run, model, corpus, trained):
        return recorded
    return measured(load_model(model), corpus, trained)[0]


def _is_of(run: Mapping, model: str, corpus: Corpus, trained: int) -> bool:
    """Whether measuring would give the recorded tables again."""
    same = {"model": model, "data_sha256": corpus.sha256, "trained": trained}
    if any(run[name] != value for name, value in same.items()):
        return False
    if not is_current(run, formulas(METRICS)):
        return False
    # Checked last, since it may read the weights.
    return run["model_revision"] == revision_of(model)


def measured(
    model: LoadedModel, corpus: Corpus, trained: int
) -> tuple[dict[str, pd.DataFrame], dict[str, object]]:
    """Tables of each text, by its unit in a first column ``text``, and the description of a run.

    Each text is a measurement of its own, since queries meet the keys of their text alone.

    Returns:
        ``clouds``, ``sinks`` and ``losses``, see the functions of these names; and the content of
        ``run.json``, whose report is of the last text.

    Raises:
        AnalysisError: a text has fewer tokens than twice the trained length, or the model does not
            rotate queries and keys.
    """
    lengths = lengths_for(trained)
    predicts = not lacks_head(model, "next")
    wanted = [metric for metric in METRICS if predicts or metric is not LOSS]
    of_clouds = {}
    of_sinks = {}
    of_losses = {}
    run = {}
    started = time.monotonic()
    for unit, text in zip(corpus.units, corpus.texts, strict=True):
        alone = Corpus(corpus.name, [text])
        tables = measure(model, alone, wanted, max_length=lengths[-1], progress=False)
        if "key_unrotated" not in {*tables["head_means"]["space"]}:
            raise AnalysisError(
                f"{model.name} does not rotate queries and keys by position: give a model that does"
            )
        if tables.report.tokens < lengths[-1]:
            raise AnalysisError(
                f"{unit} has {tables.report.tokens} tokens, and twice the trained length are "
                f"{lengths[-1]}: give fewer or longer texts, or a smaller trained length"
            )
        every = clouds(tables)
        of_clouds[unit] = every[every["length"].isin(lengths)]
        of_sinks[unit] = sinks(tables)
        of_losses[unit] = losses(tables)
        run = tables.run
    by_text = {"clouds": of_clouds, "sinks": of_sinks, "losses": of_losses}
    tables = {name: grouped(of_texts, "text") for name, of_texts in by_text.items()}
    seconds = round(time.monotonic() - started, 3)
    of_all = {"data_sha256": corpus.sha256, "texts": len(corpus), "units": len({*corpus.units})}
    return tables, {**run, **of_all, "trained": trained, "seconds": seconds}


def clouds(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """How alike queries and keys are in the beginnings of a text, before and after rotation.

    With the queries q and keys k of a head up to a position, ``queries`` is ‖Σ q‖² / (Σ ‖q‖)², the
    average cosine of two queries, weighted by their norms, each query with itself included;
    ``keys`` is the same of keys, and ``across`` that of a query and a key, Σ q · Σ k / (Σ ‖q‖ Σ
    ‖k‖). Half of the first two, minus the third, is half the squared distance of both means, each
    over the mean norm of its cloud.

    Args:
        tables: of the metrics ``METRICS`` on one text.

    Returns:
        Columns: rotation (of ``ROTATIONS``), length, layer, head (of queries), queries, keys and
        across. A layer that does not rotate has no rows before rotation.
    """
    frames = []
    for rotation, ending in ROTATIONS.items():
        query, index = _centres(tables, f"query{ending}")
        key, _ = _centres(tables, f"key{ending}")
        # With grouped queries, the queries of a group share its keys.
        key = key.repeat(query.shape[2] // key.shape[2], axis=2)
        columns = {
            "queries": (query**2).sum(-1).ravel(),
            "keys": (key**2).sum(-1).ravel(),
            "across": (query * key).sum(-1).ravel(),
        }
        frames.append(pd.DataFrame(columns, index).reset_index().assign(rotation=rotation))
    return pd.concat(frames, ignore_index=True)


def _centres(
    tables: Mapping[str, pd.DataFrame], space: str
) -> tuple[Float[np.ndarray, "length layer head dim"], pd.MultiIndex]:
    """The mean vectors of the beginnings of a text, each over the mean norm, and their index."""
    means = tables["head_means"].query("space == @space")
    norms = tables["mean_vector"].query("space == @space")
    norms = norms.sort_values(["positions", "layer", "head"])
    means = means.sort_values(["positions", "layer", "head", "dimension"])
    ends = [int(label.split("-")[-1]) for label in norms["positions"].cat.categories]
    tokens = np.diff(ends, prepend=0)[:, None, None, None]
    levels = {name: norms[name].unique() for name in ("layer", "head")}
    shape = len(ends), *map(len, levels.values()), -1
    sums = (means["mean"].to_numpy().reshape(shape) * tokens).cumsum(0)
    lengths = (norms["mean_norm"].to_numpy().reshape(shape) * tokens).cumsum(0)
    index = pd.MultiIndex.from_product([ends, *levels.values()], names=["length", *levels])
    return sums / lengths, index


def sinks(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The share of attention that the first token, or [CLS], gets from the queries of each bin.

    Returns:
        Columns: positions, layer, head and mass.
    """
    rows = tables["attention_by_token_type"]
    rows = rows[rows["key_type"].isin(["first", "cls"])]
    return rows[["positions", "layer", "head", "mass"]].reset_index(drop=True)


def losses(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """How well the tokens that follow those of each bin are predicted.

    Returns:
        Columns: positions, loss and tokens; no rows if the model has no head that predicts.
    """
    columns = ["positions", "loss", "tokens"]
    if "next_token_loss" not in tables:
        return pd.DataFrame(columns=columns)
    return tables["next_token_loss"][columns]
