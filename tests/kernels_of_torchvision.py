"""torchvision without its kernels, for ``survey.py``: it is imported only if these are declared."""

from importlib.util import find_spec
from pathlib import Path

import torch

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

if (_found := find_spec("torchvision")) and not any(Path(_found.origin).parent.glob("_C*")):
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", _BOXES)
