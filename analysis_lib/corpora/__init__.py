"""Texts, images and sounds to measure, by name, file, folder or object.

To add a corpus that comes in a package, pin the package in ``data/packages.txt`` and add a row to ``BUNDLED`` in
``bundled.py``; one on the hub is an entry of ``data/corpora.yml``.
"""

from analysis_lib.corpora.corpus import PLURAL, Corpus, Labelled, Pair
from analysis_lib.corpora.folders import title
from analysis_lib.corpora.loading import data_identity, known_corpora, load_corpus
from analysis_lib.corpora.media import ArrayImage, Sound
from analysis_lib.corpora.splits import SPLITS, check_draw, held_out
