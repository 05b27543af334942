"""Texts, images and sounds to measure, by name, file, folder or object."""

from analysis_lib.corpora.loading import (
    PLURAL,
    Corpus,
    Labelled,
    Pair,
    check_draw,
    fingerprint,
    known_corpora,
    load_corpus,
)
from analysis_lib.corpora.splits import SPLITS

__all__ = [
    "PLURAL",
    "SPLITS",
    "Corpus",
    "Labelled",
    "Pair",
    "check_draw",
    "fingerprint",
    "known_corpora",
    "load_corpus",
]
