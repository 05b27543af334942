"""Texts, images and sounds to measure, by name, file, folder or object.

A new corpus is one entry: in ``BUNDLED`` (``bundled.py``) for a pinned package, in
``data/corpora.yml`` for the hub, in ``data/folders.yml`` for a folder of CSV files.
``load_corpus``, the command line and the tests find it there.
"""

from analysis_lib.corpora.conversations import Answered, Conversation
from analysis_lib.corpora.corpus import PLURAL, Corpus, Pair
from analysis_lib.corpora.folders import title
from analysis_lib.corpora.loading import data_identity, known_corpora, load_corpus
from analysis_lib.corpora.media import ArrayImage, Captioned, Sound
from analysis_lib.corpora.splits import SPLITS, check_draw, held_out
