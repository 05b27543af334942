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
        kept = (
            pd.read_csv(folder / TABLE)
            .sort_values("accuracy", ascending=False, kind="stable")
            .iloc[0]
        )
        found = share(round(kept["accuracy"] * len(validation)), len(validation))
        numbers = dict(zip(("accuracy", "ci_low", "ci_high"), found.row, strict=True))
        about = {
            "seed": seed,
            "folder": folder,
            "epochs": int(kept["epoch"]),
            **numbers,
            "most_frequent": frequent,
        }
        rows.append(about | {"failed": found.ci_low <= frequent})
    table = pd.DataFrame(rows)
    return table.assign(judged=~table["failed"] if not table["failed"].all() else table.index == 0)


def sample(
    train: Corpus,
    test: Corpus,
    trainings: pd.DataFrame,
    of: int,
) -> str:
    """What the numbers of trainings were measured on, in words; ``of`` is how many texts there are
    to train on.
    """
    judged = trainings[trainings["judged"]]
    span = dict.fromkeys((judged["epochs"].min(), judged["epochs"].max()))
    epochs = " to ".join(map(str, span))
    failed = f", {trainings['failed'].sum()} more failed" * bool(trainings["failed"].any())
    return (
        f"{len(test):,} texts; {len(judged)} trainings of {epochs} epochs on {len(train):,} "
        f"of {of:,} texts{failed}"
    )


def verdicts(found: Sequence[Numbers], sample: str) -> pd.DataFrame:
    """The verdicts on claims from their numbers in every training: the mean, with an interval over
    trainings and texts.

    Args:
        found: for each training, by the id of a claim its number, or several that all have to lie
            beyond the bound.
        sample: what they were measured on.
    """
    rows = []
    for name in found[0]:
        parts = ([of[name]] if isinstance(of[name], Estimate) else of[name] for of in found)
        rows.append(
            claims.judged(
                name, [seed_and_unit_interval(part) for part in zip(*parts, strict=True)], sample
            )
        )
    return pd.DataFrame(rows)


def recorded(names: Sequence[str], page: str) -> pd.DataFrame:
    """The verdicts of a page on trainings that come with the book, such as
    ``minilm-on-yelphat``.
    """
    frames = [pd.DataFrame()]
    for name in names:
        run = shipping.shipped(name).run
        training, dataset = run["training"], corpora.title(name.partition("-on-")[2])
        about = (
            f"{run['texts']:,} texts; {len(training['seeds'])} trainings of at most "
            f"{training['epochs']} epochs"
        )
        about = {"dataset": dataset, "sample": f"{about} on {training['texts']:,} texts"}
        frames.append(claims.recorded(name).assign(model=title(run["model"]), **about))
    found = pd.concat(frames, ignore_index=True)
    known = claims.load("fosse")
    return found[[known[i].page == page for i in found["id"]]] if len(found) else found
