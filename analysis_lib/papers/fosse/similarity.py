"""Fosse et al. (2023), section 3: similarity inside an utterance and directions of classes, before and after."""

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from analysis_lib.errors import AnalysisError
from analysis_lib.measurement.measuring import Tables
from analysis_lib.metrics.intervals import jackknife_interval
from analysis_lib.papers.claims import published
from analysis_lib.papers.fosse.seeds import FOSSE, published_accuracies
from analysis_lib.papers.fosse.directions import cosines, mean_areas, over_utterances, pair_cosines
from analysis_lib.papers.old_claims import EstimatedClaim, TableSet, estimated
from analysis_lib.training.classification import accuracy

STAGES = ("before", "after")
# What growth from nearly every layer to the next is here: in more than three steps of four.
NEARLY_EVERY = 0.75
# Areas under the ROC curve. Two normal densities of one width still share 86 % of their area at the first.
NOT_TOLD_APART = 0.6
# Half of the way from chance to a perfect separation.
TOLD_APART = 0.75
# The cosine of a right angle, give or take 15°.
NEARLY_ORTHOGONAL = 0.25

Curves = Mapping[str, Float[np.ndarray, " layer"]]


# --- Similarity inside an utterance ---------------------------------------------------------------


def last_third(depth: int) -> int:
    """The hidden layer at which the last third of the blocks begins: 8 of 12."""
    return depth - round(depth / 3)


def _hidden(tables: TableSet) -> pd.DataFrame:
    table = tables["utterance_similarity"]
    return table[table["space"] == "hidden"].set_index("layer")


def _left_out(tables: Tables) -> Float[np.ndarray, "sample layer"]:
    """The similarity by layer, first of all utterances, then without each group of them."""
    return np.vstack(tables.left_out(lambda found: _hidden(found)["similarity"].to_numpy(dtype=float)))


def _paired(
    before: Tables, after: Tables, statistic: Callable[[Curves], Float[np.ndarray, " number"]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers that depend on both models, with intervals that leave the same utterances out of both."""
    samples = [_left_out(tables) for tables in (before, after)]
    if samples[0].shape != samples[1].shape or before.run["data_sha256"] != after.run["data_sha256"]:
        raise AnalysisError("the two do not have the same layers and texts: measure one encoder on one corpus twice")
    value, *rest = (statistic(dict(zip(STAGES, pair, strict=True))) for pair in zip(*samples, strict=True))
    return value, *jackknife_interval(value, np.array(rest).reshape(-1, len(value)))


def fosse_similarity_by_layer(before: Tables, after: Tables) -> pd.DataFrame:
    """What fine-tuning does to the similarity inside an utterance, layer by layer.

    Args:
        before, after: with ``utterance_similarity``, of the same utterances.

    Returns:
        Columns layer (0 is the embedding output), before and after (similarity of the hidden states), difference, and
        its 95 % interval: ci_low, ci_high.

    Raises:
        AnalysisError: the two have other layers, or read other texts.
    """
    difference, low, high = _paired(before, after, lambda curves: curves["after"] - curves["before"])
    one, other = (_hidden(tables)["similarity"] for tables in (before, after))
    columns = {"before": one, "after": other, "difference": difference, "ci_low": low, "ci_high": high}
    return pd.DataFrame(columns).reset_index()


def _growth(curves: Curves) -> Float[np.ndarray, " claim"]:
    """What decides the claims of :func:`fosse_similarity_verdicts`, in their order."""
    pretrained, fine_tuned = (curves[stage] for stage in STAGES)
    steps, start = np.diff(fine_tuned), last_third(len(fine_tuned) - 1)
    return np.array(
        [
            (np.diff(pretrained[:-1]) > 0).mean() if len(pretrained) > 2 else np.nan,
            pretrained[-2] - np.delete(pretrained, -2).max(),
            fine_tuned[-1] - pretrained[-1],
            steps.min(),
            steps[start:].mean() - steps[:start].mean() if start else np.nan,
        ]
    )


_SIMILARITY_CLAIMS = (
    (
        "In the pretrained model similarity grows from nearly every layer to the next, but for the last.",
        "share of the steps from a hidden layer to the next, without the last step, in which it grows",
        NEARLY_EVERY,
    ),
    (
        "In the pretrained model it is largest after the last layer but one.",
        "similarity there minus the largest elsewhere",
        0.0,
    ),
    (
        "The convergence is more marked after fine-tuning.",
        "similarity after the last layer, fine-tuned minus pretrained",
        0.0,
    ),
    (
        "In the fine-tuned model similarity grows in every layer.",
        "growth from a hidden layer to the next, where it is least",
        0.0,
    ),
    (
        "In the fine-tuned model growth is most marked in the last third of the layers (the last 4 of 12).",
        "mean growth a layer in that third minus that in the layers before",
        0.0,
    ),
)


def fosse_similarity_verdicts(before: Tables, after: Tables) -> pd.DataFrame:
    """The verdicts on the claims of section 3 about the similarity inside an utterance.

    Args:
        before, after: with ``utterance_similarity``, of the same utterances.

    Returns:
        The columns of ``verdicts``; intervals leave the same utterances out of both models.

    Raises:
        AnalysisError: as :func:`fosse_similarity_by_layer`.
    """
    found = np.transpose(_paired(before, after, _growth)).tolist()
    claims = [("sec. 3", *told, tuple(estimate)) for told, estimate in zip(_SIMILARITY_CLAIMS, found, strict=True)]
    return estimated(claims, FOSSE)


def compare_fosse_similarity(before: TableSet, after: TableSet) -> pd.DataFrame:
    """The numbers that section 3 prints beside those of the same places of another model.

    Returns:
        Columns model (pretrained or fine-tuned), position, layer (ours), ours, ci_low, ci_high and published.
    """
    paper = published("fosse_section3_intra_similarity_esnli")
    rows = []
    for row in paper.itertuples():
        stage = "fine-tuned" if row.model.endswith("fine-tuned") else "pretrained"
        hidden = _hidden(after if stage == "fine-tuned" else before)
        depth = hidden.index.max()
        places = {"input": 0, "output": depth, "penultimate layer": depth - 1}
        layer = places.get(row.position, last_third(depth))
        ours = hidden.loc[layer, ["similarity", "ci_low", "ci_high"]]
        rows.append((stage, row.position, layer, *ours, row.mean_similarity))
    names = ["model", "position", "layer", "ours", "ci_low", "ci_high", "published"]
    return pd.DataFrame(rows, columns=names)


def compare_fosse_accuracy(predictions: pd.DataFrame, model: str, data: str) -> pd.DataFrame:
    """The accuracy of a fine-tuned encoder above the published ones of BERT-base (Table 1, first row).

    Args:
        predictions: from ``training.predict``.
        model, data: what was fine-tuned, and on what.

    Returns:
        Columns model, corpus, accuracy, ci_low, ci_high and most_frequent, the share of the most frequent class.
    """
    paper = published_accuracies("bert-finetuned").rename(columns={"dataset": "corpus", "published": "accuracy"})
    share = predictions["label"].value_counts(normalize=True).max()
    ours = pd.DataFrame([{"model": model, "corpus": data, **accuracy(predictions), "most_frequent": share}])
    return pd.concat([ours, paper.assign(model="BERT-base, published")], ignore_index=True)[ours.columns]


# --- The direction is the class -------------------------------------------------------------------


def fosse_direction_verdicts(
    before: Float[np.ndarray, "utterance width"],
    after: Float[np.ndarray, "utterance width"],
    labels: Int[np.ndarray, " utterance"],
    correct: Bool[np.ndarray, " utterance"],
) -> pd.DataFrame:
    """The verdicts on the claims of section 3 about the direction of a class.

    Every utterance that the fine-tuned model classifies correctly takes its turn as the representative of its class, in
    both models. That the other class is nearly orthogonal, the paper says of two classes, and only then it has rows.

    Args:
        before, after: from ``class_directions.class_vectors``, of the same utterances.
        labels: the class of each.
        correct: whether the fine-tuned model finds it.

    Returns:
        The columns of ``verdicts``; intervals are jackknife ones over utterances.
    """
    one, other = cosines(before), cosines(after)

    def numbers(kept: Int[np.ndarray, " kept"]) -> list[float]:
        areas = [mean_areas(similar, labels, correct, kept) for similar in (one, other)]
        pairs = [of_others for _, of_others in pair_cosines(other, labels, correct, kept)]
        medians = [NEARLY_ORTHOGONAL - abs(np.median(of)) for of in pairs]
        shares = [(np.abs(of) < NEARLY_ORTHOGONAL).mean() for of in pairs]
        gains = areas[1] - areas[0]
        return [NOT_TOLD_APART - areas[0].max(), areas[1].min(), gains.min(), min(medians), min(shares)]

    found = [tuple(map(float, estimate)) for estimate in zip(*over_utterances(numbers, len(labels)), strict=True)]
    area = "area under the ROC curve of the cosine to a representative, mean over representatives"
    claims: list[EstimatedClaim] = [
        (
            "sec. 3",
            "Before fine-tuning, the cosine to a representative does not tell the classes apart.",
            f"{NOT_TOLD_APART} minus the {area}, class where that is largest",
            0.0,
            found[0],
        ),
        (
            "sec. 3",
            "After it, the direction tells the class.",
            f"{area}, class where it is least",
            TOLD_APART,
            found[1],
        ),
        (
            "sec. 3",
            "That is due to fine-tuning.",
            "the same, after minus before, class where it is least",
            0.0,
            found[2],
        ),
        (
            "sec. 3",
            "Utterances of the other class are nearly orthogonal to a representative, in the median.",
            f"{NEARLY_ORTHOGONAL} minus |median cosine| of other utterances, after it, class where that is largest",
            0.0,
            found[3],
        ),
        (
            "sec. 3",
            "Most utterances of the other class are nearly orthogonal to a representative.",
            f"share of other utterances with |cosine| below {NEARLY_ORTHOGONAL}, after it, class where it is least",
            0.5,
            found[4],
        ),
    ]
    return estimated(claims if len(np.unique(labels)) == 2 else claims[:3], FOSSE)
