"""Where tensors are computed."""

import torch

from analysis_lib.errors import AnalysisError


def usable(device: str | None) -> str:
    """The device asked for; without one, a GPU where there is one, else the CPU.

    Raises:
        AnalysisError: nothing can be computed there.

    >>> usable("cpu")
    'cpu'
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        known = "cpu, cuda" if torch.cuda.is_available() else "cpu"
        raise AnalysisError(f"the device {device} cannot be used here: give one of {known}") from error
    return device
