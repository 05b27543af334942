"""Encoders that are fine-tuned several times over, and the verdicts on what they have in common."""

from collections.abc import Mapping, Sequence

import pandas as pd

from analysis_book.papers import claims
from analysis_book.training import finetune
from analysis_book.training.text_classifiers import TABLE
from analysis_lib import corpora
from analysis_lib.corpora import Corpus
from analysis_lib.measurement import shipping
from analysis_lib.metrics.intervals import Estimate, seed_and_unit_interval, share
from analysis_lib.models import LoadedModel, title

Numbers = Mapping[str, Estimate | list[Estimate]]


def finetunings(
    model: LoadedModel,
    train: Corpus,
    validation: Corpus,
    seeds: int,
    first: int = 0,
    **settings,
) -> pd.DataFrame:
    """Fine-tune an encoder until so many trainings have succeeded, or twice as many are done.

    A training has failed where the validation texts do not show that it does better than one class
    for all: where Wilson's interval of the accuracy of the epoch that is kept holds the share of
    the most frequent class.

    Args:
        model, train, validation: as ``finetune`` takes them.
        seeds: how many have to succeed.
        first: the seed of the first; the others follow it.
        settings: of ``finetune``.

    Returns:
        One row per training: seed, folder, epochs (until the state that is kept), accuracy, ci_low
        and ci_high (on the validation texts, in that epoch), most_frequent (the share of that
        class), failed, and judged: whether verdicts are about it. Where all have failed, the first
        one is, which gives numbers no interval.
    """
    frequent = pd.Series(validation.labels).value_counts(normalize=True).max()
    rows: list[dict] = []
    while len(rows) < 2 * seeds and sum(not row["failed"] for row in rows) < seeds:
        seed = first + len(rows)
        folder = finetune(model, train, validation, seed=seed, **settings)
        epochs = pd.read_csv(folder / TABLE)
        kept = epochs.sort_values("accuracy", ascending=False, kind="stable").iloc[0]
        correct = round(kept["accuracy"] * len(validation))
        accuracy = share(correct, len(validation))
        row = {
            "seed": seed,
            "folder": folder,
            "epochs": int(kept["epoch"]),
            "accuracy": accuracy.value,
            "ci_low": accuracy.ci_low,
            "ci_high": accuracy.ci_high,
            "most_frequent": frequent,
            "failed": accuracy.ci_low <= frequent,
        }
        rows.append(row)
    table = pd.DataFrame(rows)
    judged = ~table["failed"]
    if not judged.any():
        judged = table.index == 0
    return table.assign(judged=judged)


def sample(
    train: Corpus,
    test: Corpus,
    trainings: pd.DataFrame,
    of: int,
) -> str:
    """The texts and trainings of some numbers, in words.

    Args:
        of: how many texts there are to train on.
    """
    judged = trainings[trainings["judged"]]
    span = dict.fromkeys((judged["epochs"].min(), judged["epochs"].max()))
    epochs = " to ".join(map(str, span))
    failed = f", {trainings['failed'].sum()} more failed" * bool(trainings["failed"].any())
    return (
        f"{len(test):,} texts; {len(judged)} trainings of {epochs} epochs on {len(train):,} "
        f"of {of:,} texts{failed}"
    )


def verdicts(numbers: Sequence[Numbers], sample: str) -> pd.DataFrame:
    """The verdicts on claims from the mean of their numbers over trainings.

    Its interval is over trainings and texts.

    Args:
        numbers: for each training, by the id of a claim its number, or several that all have to lie
            beyond the bound.
        sample: what they were measured on.
    """
    rows = []
    for name, first in numbers[0].items():
        of_trainings = [training[name] for training in numbers]
        if isinstance(first, Estimate):
            of_trainings = [[estimate] for estimate in of_trainings]
        means = []
        for estimates in zip(*of_trainings, strict=True):
            means.append(seed_and_unit_interval(estimates))
        rows.append(claims.judged(name, means, sample))
    return pd.DataFrame(rows)


def recorded(names: Sequence[str], page: str) -> pd.DataFrame:
    """The verdicts of a page on shipped trainings, such as ``minilm-on-yelphat``."""
    frames = [pd.DataFrame()]
    for name in names:
        run = shipping.shipped(name).run
        training = run["training"]
        dataset = corpora.title(name.partition("-on-")[2])
        sample = (
            f"{run['texts']:,} texts; {len(training['seeds'])} trainings of at most "
            f"{training['epochs']} epochs on {training['texts']:,} texts"
        )
        frame = claims.recorded(name)
        frames.append(frame.assign(model=title(run["model"]), dataset=dataset, sample=sample))
    rows = pd.concat(frames, ignore_index=True)
    if rows.empty:
        return rows
    known = claims.load("fosse")
    of_page = [known[name].page == page for name in rows["id"]]
    return rows[of_page]
