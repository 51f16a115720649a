"""torchvision, which timm and torchmetrics import, beside a torch for CPUs."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch


def define_operators_of_vision() -> None:
    """Let torchvision's build for CUDA, which is the one on PyPI, be imported beside a torch for CPUs.

    Its library of operators cannot be loaded then, and it fails at the first one it describes.
    """
    if _kept or importlib.util.find_spec("torchvision") is None or torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)  # its operators go with it


_kept: list[Any] = []
