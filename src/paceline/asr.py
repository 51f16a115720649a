"""Speech recognition from Python: `paceline.asr.load("runs/a").transcribe(["one.flac"])`, and the networks."""

from __future__ import annotations

from paceline.recipes.speech.fast import channels_last, fused
from paceline.recipes.speech.network.config import read_network
from paceline.recipes.speech.network.encoder import Encoder
from paceline.recipes.speech.recognizer import Recognizer, load

__all__ = ["Encoder", "Recognizer", "channels_last", "fused", "load", "read_network"]
