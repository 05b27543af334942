"""How alike a model with two towers finds an image or a sound and its text, and other texts."""

import numpy as np
from torch.nn import functional

from analysis_lib.capture import EMBEDDINGS, Activations
from analysis_lib.metrics.accumulator import Columns, LayerSums, Metric


class PairCosine(Metric):
    r"""Cosine of an image or a sound and its text in a model with two towers, such as CLIP.

    With u_i and v_i, the two output vectors of pair i, at unit length, and N pairs, the measures
    are:

    - ``matched``, the mean of u_i · v_i, which training raises (Radford et al. 2021, fig. 3);
    - ``mismatched``, the mean of u_i · v_j over all i ≠ j, which it lowers; exact, as no pair is
      formed: (Σ u_i · Σ v_j − Σ u_i · v_i) / (N (N − 1));
    - ``difference``, matched − mismatched: how much more alike an image is to its own text;
    - ``modality_gap``, ‖ū − v̄‖, the distance of the means of both kinds (Liang et al. 2022):
      images and texts can lie apart although each image is nearest to its own text.

    Columns: layer (the last); measure; value, in [−1, 1], the difference and the gap in [−2, 2]
    and [0, 2], with its 95 % interval; and pairs, N. Of a single pair, mismatched and difference
    are missing. Made on request: most models have no such vectors.
    """

    name = "pair_cosine"
    needs = frozenset({EMBEDDINGS})
    axes = ("measure",)
    interval = "value"
    # Of each measure.
    limits = (np.array([-1, -1, -2, 0]), np.array([1, 1, 2, 2]))
    counts = "pairs"
    on_request = True
    no_bins = "its vectors are of whole images, sounds and texts"

    def update(self, activations: Activations) -> None:
        if activations.embeddings is None:
            return
        layer = activations.layer
        files, texts = (
            functional.normalize(vectors.double(), dim=-1) for vectors in activations.embeddings
        )
        texts = texts.to(files.device)
        cosines = (files * texts).sum(-1)
        self.add(("files", layer), files, activations)
        self.add(("texts", layer), texts, activations)
        self.add(("matched", layer), cosines, activations)
        self.add(("pairs", layer), cosines.new_ones(len(cosines)), activations)

    def rows(self, sums: LayerSums) -> Columns:
        pairs = sums["pairs"]
        files, texts = sums["files"], sums["texts"]
        of_all = (files * texts).sum(-1) - sums["matched"]
        others = np.where(pairs > 1, pairs - 1, np.nan)
        measures = {
            "matched": sums["matched"] / pairs,
            "mismatched": of_all / pairs / others,
        }
        measures["difference"] = measures["matched"] - measures["mismatched"]
        measures["modality_gap"] = np.linalg.norm(files - texts, axis=-1) / pairs
        return {
            "measure": np.array([*measures]),
            "value": np.stack([*measures.values()], -1),
            "pairs": pairs[:, None].astype(int),
        }
