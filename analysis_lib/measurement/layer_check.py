"""Which layers of a model the hidden states are that vLLM has written."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from analysis_lib import capture
from analysis_lib.capture.batching import make_batches
from analysis_lib.capture.given import layer_names, refuse_other_layers
from analysis_lib.capture.vector_files import IDS, StateFile, arrays_in, state_files
from analysis_lib.errors import AnalysisError
from analysis_lib.models import LoadedModel, load_model
from analysis_lib.models.devices import embedded_words
from analysis_lib.models.tokenization import Encoded

# Texts that are compared, evenly spaced in the folder, and tokens at the beginning of each.
TEXTS = 4
TOKENS = 512
# Largest difference of vectors that are those of a layer, as a share of their norm. In
# SmolLM2-135M, bfloat16 differs from single precision by some 0.02, by 0.07 in a text of one token,
# and a layer from the next one by 0.22 or more.
LIMIT = 0.2
# By what factor the next nearest layer must differ more.
MARGIN = 2


@dataclass(frozen=True, eq=False)
class LayerCheck:
    """Which layers of a model given hidden states are.

    Attributes:
        model: the name of the model.
        layers: the layer of each column of the files, ``hidden_3`` or ``final_3``.
        differences: table of column, space, layer and ``difference``: the relative difference of
            the vectors of a column from those of a layer, ‖v − h‖ / max(‖v‖, ‖h‖), its median over
            the tokens of a text, in the text where that is largest.
        texts, tokens: number of texts and tokens that were compared.
    """

    model: str
    layers: tuple[str, ...]
    differences: pd.DataFrame
    texts: int
    tokens: int

    @property
    def difference(self) -> float:
        """The largest difference of a column from its layer."""
        return float(self._ranked.nth(0).max())

    @property
    def next_difference(self) -> float:
        """The smallest difference of a column from its next nearest layer."""
        return float(self._ranked.nth(1).min())

    @property
    def _ranked(self) -> pd.api.typing.SeriesGroupBy:
        return self.differences.sort_values("difference").groupby("column")["difference"]

    @property
    def argument(self) -> str:
        """The layers as ``--layers`` takes them, such as ``1,2,final_3``."""
        return as_argument(self.layers)

    def __str__(self) -> str:
        table = self.differences
        # Layers that a norm follows: behind it, their vectors are others.
        normed = {*table["layer"][table["space"] == "final"]}
        words = []
        for space, more in (("hidden", ""), ("final", " after the final norm")):
            if numbers := _numbers(self.layers, space):
                of_model = "" if words else f" of {self.model}"
                words.append(f"{_listed(numbers)}{of_model}{more}")
        if normed.intersection(_numbers(self.layers, "hidden")):
            words.insert(1, "the last before the final norm")
        return (
            f"{', '.join(words)} (relative difference {self.difference:.1g} at most; from the next "
            f"nearest layer, {self.next_difference:.1g} or more)"
        )

    def described(self) -> dict[str, object]:
        """The entry ``layer_check`` of ``run.json``."""
        return {
            "model": self.model,
            "layers": [*self.layers],
            "texts": self.texts,
            "tokens": self.tokens,
            "difference": self.difference,
            "next_difference": self.next_difference,
        }


def check_layers(
    vectors: Path | str,
    model: LoadedModel | str | Path | nn.Module,
    layers: Sequence[int | str] | None = None,
    *,
    tokenizer: object = None,
    **options: object,
) -> LayerCheck:
    """Find out which layers the hidden states are that vLLM has written.

    The folder holds numbers without names, and versions of vLLM count layers differently. The
    model reads the token ids of four texts, evenly spaced in the folder, up to 512 tokens of each,
    and its hidden states (0 for the embeddings, l for the output of block l, the last one before
    and after the final norm) are compared with each layer in the files. Kernels of vLLM in half
    precision differ from those of transformers by some hundredths of the norm; layers differ by
    more. So the nearest layer is taken, if it differs by 0.2 at most, and the next nearest one by
    more than twice as much.

    Args:
        vectors: a folder of the files of vLLM, see :func:`measure_vectors`.
        model: from ``load_model``, or one of its arguments.
        layers: which layers the files are said to have, in order; None to find out.
        tokenizer: for a model object, its tokenizer; for other models, see ``load_model``.
        options: further arguments of ``load_model``, such as ``dtype``.

    Returns:
        The layers; printed, they are a line such as ``layers 1 to 36 of MODEL, the last before the
        final norm``.

    Raises:
        AnalysisError: the layers are others than those given; no layer fits, as with another model
            or other weights, or two fit alike; a token is beyond the vocabulary; the width is that
            of another model; or the folder is not one of vLLM.
    """
    texts = state_files(vectors, arrays_in(vectors))
    given = None if layers is None else layer_names(layers)
    if given is not None:
        refuse_other_layers(str(vectors), texts, given)
    if not isinstance(model, LoadedModel):
        model = load_model(model, processor=tokenizer, **options)
    if model.kind != "text":
        raise AnalysisError(f"{model.name} reads {model.kind}s: give the model of the vectors")
    spaced = np.linspace(0, len(texts) - 1, TEXTS).round().astype(int)
    chosen = [texts[index] for index in dict.fromkeys(spaced.tolist())]
    length = min(model.max_length, TOKENS)
    tables = [_differences(model, text, length) for text in chosen]
    rows = pd.concat(tables)
    table = rows.groupby(["column", "space", "layer"], as_index=False)["difference"].max()
    nearest = tuple(_nearest(f"{vectors}", model.name, *group) for group in table.groupby("column"))
    tokens = sum(min(text.shape[0], length) for text in chosen)
    check = LayerCheck(model.name, nearest, table, len(chosen), tokens)
    if given is not None and given != nearest:
        raise AnalysisError(
            f"{vectors}: layers (--layers) says {as_argument(given)}, and the vectors are those of "
            f"{check}: give {check.argument}"
        )
    return check


def _differences(loaded: LoadedModel, text: StateFile, length: int) -> pd.DataFrame:
    """The median difference of each column from each layer, in the beginning of a text.

    Raises:
        AnalysisError: the model has no such token, or vectors of another width.
    """
    ids, states = text.beginning(length)
    words = embedded_words(loaded.model)
    for index in ids:
        if not 0 <= index < words:
            raise AnalysisError(
                f"{text.path}: its {IDS} have {index}, and {loaded.name} embeds tokens up to "
                f"{words - 1}: give the model that the vectors are of"
            )
    rows = []
    widths = set()

    def receive(activations: capture.Activations) -> None:
        for space, vectors in activations.spaces.items():
            hidden = vectors.values[0, 0].cpu()
            widths.add(hidden.shape[1])
            # Some stacks read other tokens than the text's.
            if hidden.shape != states[:, 0].shape:
                continue
            for column, values in enumerate(states.unbind(1)):
                difference = relative_difference(values, hidden)
                rows.append((column, space, activations.layer, difference))

    encoded = Encoded({"input_ids": ids}, [False] * len(ids))
    for batch in make_batches(loaded, [encoded], [0], True, len(ids)):
        capture.run(loaded, batch, frozenset({"hidden", "final"}), receive)
    if not rows:
        raise AnalysisError(
            f"{text.path} has vectors of {states.shape[2]} dimensions, and {loaded.name} of "
            f"{', '.join(map(str, sorted(widths)))}: give the model that the vectors are of"
        )
    return pd.DataFrame(rows, columns=["column", "space", "layer", "difference"])


def relative_difference(
    values: Float[Tensor, "token width"], others: Float[Tensor, "token width"]
) -> float:
    """The median over tokens of ‖v − h‖ / max(‖v‖, ‖h‖), from 0 to 2; infinite if not finite.

    The median, since a few tokens are hundreds of times as long as all others.
    """
    norms = torch.maximum(values.norm(dim=1), others.norm(dim=1))
    tiny = torch.finfo(norms.dtype).tiny
    shares = (values - others).norm(dim=1) / norms.clamp_min(tiny)
    return shares.nan_to_num(torch.inf).median().item()


def _nearest(folder: str, model: str, column: int, table: pd.DataFrame) -> str:
    """The layer that the vectors of a column are those of.

    Raises:
        AnalysisError: no layer is near, or two are.
    """
    ranked = table.sort_values("difference", kind="stable")
    names = [
        f"{space}_{layer}" for space, layer in zip(ranked["space"], ranked["layer"], strict=True)
    ]
    nearest, following = ranked["difference"][:2]
    which = f"{folder}: layer number {column + 1} of those in its files"
    first, second = (as_argument([name]) for name in names[:2])
    if nearest > LIMIT:
        raise AnalysisError(
            f"{which} is none of {model}: the nearest, {first}, differs by {nearest:.2g} of the "
            f"norm, where rounding makes {LIMIT} at most: give the model and the weights that the "
            "vectors are of, or make them again without chunked prefill"
        )
    if following <= MARGIN * nearest:
        raise AnalysisError(
            f"{which} may be {first} or {second} of {model}, from which it differs by "
            f"{nearest:.2g} and {following:.2g} of the norm: make them again in a higher precision"
        )
    return names[0]


def as_argument(layers: Iterable[str]) -> str:
    """Names of layers as ``--layers`` takes them: ``1`` for ``hidden_1``."""
    return ",".join(layer.removeprefix("hidden_") for layer in layers)


def _numbers(layers: Iterable[str], space: str) -> list[int]:
    names = (layer.split("_") for layer in layers)
    return [int(number) for own, number in names if own == space]


def _listed(numbers: Sequence[int]) -> str:
    """Numbers of layers in words.

    >>> _listed([1, 2, 3]), _listed([2, 5]), _listed([7])
    ('layers 1 to 3', 'layers 2 and 5', 'layer 7')
    """
    *others, last = map(str, numbers)
    if not others:
        return f"layer {last}"
    if [*numbers] == [*range(numbers[0], numbers[0] + len(numbers))] and len(numbers) > 2:
        return f"layers {others[0]} to {last}"
    return f"layers {', '.join(others)} and {last}"
