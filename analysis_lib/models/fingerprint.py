"""Fingerprints of weights that a program holds: exact sums, made where the weights lie."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

# So many sums are made of a tensor. A prime: swapped rows of any common width end in other sums.
SUMS = 1021


def fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    """The SHA-256 of names, types, shapes and exact sums of tensors.

    The bytes of a tensor are read as whole numbers of 64 bits, w_0, w_1, ..., of which S_c = Σ_r
    w_(1021 r + c) mod 2⁶⁴ is summed where the tensor lies. A change of a single number changes
    one of these sums; to read the weights once takes a small part of a forward pass.
    """
    digest = hashlib.sha256()
    for name, weight in weights:
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(_sums(weight.detach()).cpu().numpy().tobytes())
    return digest.hexdigest()


def _sums(weight: Tensor) -> Tensor:
    content = weight.contiguous().flatten().view(torch.uint8)
    if content.storage_offset() % 8:
        # As whole numbers of 64 bits, a view begins at a multiple of their size.
        content = content.clone()
    width = 8 * SUMS
    whole = content.numel() // width * width
    rest = content[whole:]
    last = torch.zeros(width, dtype=torch.uint8, device=content.device)
    last[: rest.numel()] = rest
    last = last.view(torch.int64)
    if not whole:
        return last
    return content[:whole].view(torch.int64).view(-1, SUMS).sum(0) + last
