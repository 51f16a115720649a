"""Use a trained speech recogniser from Python: `paceline.asr.load("runs/a").transcribe(["one.flac", "two.wav"])`."""

from __future__ import annotations

from paceline.recipes.asr.recognizer import Recognizer, load

__all__ = ["Recognizer", "load"]
