"""espeak-ng, the speech synthesiser, called in its shared library.

It keeps a state from one utterance to the next (flutter of the voice, noise of breath): the same call sounds a little
different later on. Only a fresh process that speaks the same things in the same order gives the same samples.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import NotInstalled, PacelineError

# of espeak-ng's speak_lib.h
_SYNCHRONOUS = 2
_DONT_EXIT = 0x8000
_POSITION_CHARACTER = 1
_UTF8 = 1
_RATE, _VOLUME, _PITCH, _RANGE = 1, 2, 3, 4
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


class EspeakFailed(PacelineError):
    """The library is there and does not work."""

    why: str
    sentence = "espeak-ng cannot speak: {why}"
    hint = "pip install --force-reinstall espeakng-loader"


def require_espeak() -> None:
    if importlib.util.find_spec("espeakng_loader") is None:
        raise NotInstalled(
            "speaking the demo corpus needs espeak-ng (package espeakng-loader), which is not installed",
            hint="pip install 'paceline[demo]'",
        )


class Espeak:
    """One synthesiser; a process has no use for a second, because they would share the library's state."""

    def __init__(self) -> None:
        require_espeak()
        import espeakng_loader

        try:
            self._library = ctypes.CDLL(espeakng_loader.get_library_path())
            self._data = Path(espeakng_loader.get_data_path())
        except (OSError, RuntimeError) as error:
            raise EspeakFailed(str(error)) from error
        self.sample_rate: int = self._library.espeak_Initialize(_SYNCHRONOUS, 0, bytes(self._data), _DONT_EXIT)
        if self.sample_rate <= 0:
            raise EspeakFailed(f"it does not start with the data in {self._data}")
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(1))  # else the noise of breath depends on the clock
        self._blocks: list[bytes] = []
        self._callback = _CALLBACK(self._take)  # the library keeps no reference
        self._library.espeak_SetSynthCallback(self._callback)

    @property
    def version(self) -> str:
        self._library.espeak_Info.restype = ctypes.c_char_p
        return str(self._library.espeak_Info(None).decode())

    def say(
        self, text: str, voice: str, *, words_per_minute: int, pitch: int, pitch_range: int, volume: int
    ) -> NDArray[np.int16]:
        """Samples at `sample_rate`. A voice is a language and a variant, such as `en-us+f3`.

        Pitch and its range are 50 where the voice is as it was made (0 to 100), the volume is 100.
        """
        variant = voice.partition("+")[2]
        # the library passes over a variant that it does not have
        if variant and not (self._data / "voices" / "!v" / variant).is_file():
            raise EspeakFailed(f"it has no voice {voice!r}")
        if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise EspeakFailed(f"it has no voice {voice!r}")
        settings = {_RATE: words_per_minute, _PITCH: pitch, _RANGE: pitch_range, _VOLUME: volume}
        for parameter, value in settings.items():
            self._library.espeak_SetParameter(parameter, value, 0)
        self._blocks.clear()
        data = text.encode()
        size = ctypes.c_size_t(len(data) + 1)
        if self._library.espeak_Synth(data, size, 0, _POSITION_CHARACTER, 0, _UTF8, None, None) != 0:
            raise EspeakFailed(f"{text!r} with voice {voice!r}")
        return np.frombuffer(b"".join(self._blocks), np.int16)

    def _take(self, samples: int | None, count: int, _events: int | None) -> int:
        if samples and count > 0:
            self._blocks.append(ctypes.string_at(samples, 2 * count))
        return 0
