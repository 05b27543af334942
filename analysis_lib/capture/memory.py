"""Running out of memory, said as what it is."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from analysis_lib.capture.inputs import Batch
from analysis_lib.errors import AnalysisError
from analysis_lib.models import LoadedModel

# PyTorch's allocators of processors raise plain errors.
_WORDS = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)
_REQUESTED = re.compile(r"tried to allocate ([\d.]+ ?\w+)", re.IGNORECASE)


class OutOfMemory(AnalysisError):
    """A batch that does not fit the memory of its device.

    Attributes:
        several: whether it has more than one utterance, so that a smaller one may fit.
    """

    several = False


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed, on whatever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None


@contextmanager
def memory_errors(loaded: LoadedModel, batch: Batch) -> Iterator[None]:
    """A context in which a failed allocation is an :class:`OutOfMemory` that describes the batch.

    Raises:
        OutOfMemory: the memory of the device does not suffice.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # Without the error that it comes from, whose frames hold the tensors.
        failure = _described(loaded, batch, str(error))
    else:
        return
    raise failure


def _described(loaded: LoadedModel, batch: Batch, words: str) -> OutOfMemory:
    requested = _REQUESTED.search(words)
    amount = f" ({requested[1]} asked for)" if requested else ""
    count = len(batch.groups)
    of_length = ""
    if batch.tokens is not None:
        of_length = f" of up to {batch.tokens.mask.shape[1]} tokens"
    remedy = "give a smaller tokens_per_batch"
    if count == 1:
        remedy = "give shorter texts, a smaller model or precision, or another device"
    failure = OutOfMemory(
        f"{loaded.name}: out of memory on {loaded.device}{amount}, for a batch of {count}"
        f"{of_length}: {remedy}"
    )
    failure.several = count > 1
    return failure
