"""Texts, images and sounds to measure, by name, file, folder or object.

A new corpus is one entry: of a pinned package in ``BUNDLED`` (``bundled.py``), of the hub in
``data/corpora.yml``, of a folder of CSV files in ``data/folders.yml``. ``load_corpus``, the command
line and the tests find it there.
"""

from analysis_lib.corpora.corpus import PLURAL, Corpus, Pair
from analysis_lib.corpora.folders import title
from analysis_lib.corpora.loading import data_identity, known_corpora, load_corpus
from analysis_lib.corpora.media import ArrayImage, Sound
from analysis_lib.corpora.splits import SPLITS, check_draw, held_out
