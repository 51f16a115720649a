"""Recordings as arrays: of 16 bits, or of floats between -1 and 1."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import InvalidData, WrongType

_ARRAYS = "give int16 samples, or floats between -1 and 1, of one channel at the model's `sample_rate`"


def as_array(audio: Any) -> NDArray[Any]:
    """Return an array of one channel, int16 or floats, from one or from a tensor; refuse anything else."""
    array = audio.detach().cpu().numpy() if isinstance(audio, Tensor) else audio
    if not isinstance(array, np.ndarray):
        raise WrongType(
            f"a {type(audio).__name__} is not audio",
            hint="give a path, or an array of int16 samples or of floats between -1 and 1, of one channel",
        )
    if array.ndim != 1 or (array.dtype != np.int16 and array.dtype.kind != "f"):
        raise WrongType(f"an array of {array.dtype} with shape {array.shape} is not audio", hint=_ARRAYS)
    if array.dtype != np.int16 and not np.isfinite(array).all():
        raise InvalidData(f"an array of {array.dtype} with shape {array.shape} has nan or inf", hint=_ARRAYS)
    return array


def as_samples(audio: Any) -> NDArray[np.int16]:
    """Return 16-bit samples of an array or a tensor."""
    array = as_array(audio)
    if array.dtype == np.int16:
        return array
    # In double precision: in half precision full scale has no number.
    return np.clip(np.rint(array.astype(np.float64) * 32768.0), -32768, 32767).astype(np.int16)
