"""Layers that wait for one another, so that sums over their vectors are computed together."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from analysis_lib.capture.activations import Activations, Receive
from analysis_lib.capture.vectors import Vectors

# Largest number of components that are copied so that sums are computed together: more take longer
# to copy than several operations take to begin.
MOST, MOST_ON_GPU = 2**16, 2**24


class Joining:
    """Passes on the vectors of several layers at a time, whose sums are computed together.

    On a GPU, a sum over the tokens of a few texts takes less time than its operation takes to
    begin. So small vectors of neighbouring layers, and of all their spaces, are laid side by side
    as if they were heads of one space. Layers with many vectors are passed on at once.

    Args:
        receive: takes the vectors of each layer, in order.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._waiting: list[Activations] = []
        self._copies: dict[Vectors, Vectors] = {}
        self._size = 0

    def add(self, activations: Activations) -> Activations:
        """Take a layer, and pass on those before it if there are enough of them.

        Returns:
            The layer with copies of its vectors, whose sums are known to all that read them.
        """
        size = sum(vectors.values.numel() for vectors in activations.spaces.values())
        most = MOST if activations.tokens.mask.device.type == "cpu" else MOST_ON_GPU
        if self._size + size > most:
            self.flush()
        if size > most:
            self._receive(activations)
            return activations
        activations = self._copied(activations)
        self._size += size
        # Attention would hold more memory than the vectors do.
        self._waiting.append(replace(activations, attention=None, scores=None))
        return activations

    @torch.inference_mode()
    def flush(self) -> None:
        """Pass on all layers that wait."""
        for alike in _alike(self._copies.values()):
            Vectors.join(alike)
        for activations in self._waiting:
            self._receive(activations)
        self._waiting = []
        self._copies = {}
        self._size = 0

    def _copied(self, activations: Activations) -> Activations:
        """The same layer with vectors that the rest of the forward pass cannot change in place."""
        new = [vectors for vectors in activations.spaces.values() if vectors not in self._copies]
        for alike in _alike(dict.fromkeys(new)):
            every = torch.cat([vectors.values for vectors in alike], 1)
            heads = [vectors.values.shape[1] for vectors in alike]
            for vectors, values in zip(alike, every.split(heads, 1), strict=True):
                self._copies[vectors] = Vectors(values, vectors.tokens)
        spaces = {name: self._copies[vectors] for name, vectors in activations.spaces.items()}
        return replace(activations, spaces=spaces)


def _alike(every: Iterable[Vectors]) -> list[list[Vectors]]:
    """The vectors of the same tokens and of the same width, in one precision, together."""
    groups: dict[tuple, list[Vectors]] = {}
    for vectors in every:
        width = vectors.values.shape[-1]
        key = vectors.tokens, width, vectors.values.dtype, vectors.values.device
        groups.setdefault(key, []).append(vectors)
    return [*groups.values()]
