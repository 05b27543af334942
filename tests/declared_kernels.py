"""Declares the kernels that torchvision asks for when it is imported: ``make .venv/.vision``."""

import torch

BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", BOXES)
