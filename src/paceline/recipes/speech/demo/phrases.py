"""Phrases of the demo corpus: connected digits and short commands of a house, from a grammar of some sixty words."""

from __future__ import annotations

import random
from typing import Final

from paceline.recipes.speech.text.english import DIGITS

MAX_DIGITS: Final = 5
_NUMBERS: Final = (*DIGITS[2:], "ten", "twenty", "thirty")
_CHOICES: Final = {
    "switch": ("on", "off"),
    "room": ("kitchen", "bedroom", "garden", "hall"),
    "device": ("light", "lamp", "fan"),
    "move": ("open", "close"),
    "opening": ("door", "window", "gate"),
    "clock": ("a timer", "an alarm"),
    "number": _NUMBERS,
    "unit": ("seconds", "minutes", "hours"),
    "sound": ("music", "song", "alarm", "timer"),
    "style": ("some music", "the next song", "the news"),
    "way": ("up", "down"),
    "whom": ("home", "mother"),
    "day": ("today", "tomorrow"),
}
_COMMANDS: Final = (
    "turn {switch} the {room} {device}",
    "turn the {device} {switch}",
    "set {clock} for {number} {unit}",
    "set {clock} for one minute",
    "{move} the {room} {opening}",
    "{move} the {opening}",
    "stop the {sound}",
    "play {style}",
    "turn the volume {way}",
    "call {whom}",
    "what time is it",
    "what is the weather {day}",
)


def phrase(dice: random.Random) -> str:
    """Return digits or a command, each with probability one half."""
    if dice.random() < 0.5:
        return " ".join(dice.choice(DIGITS) for _ in range(dice.randint(1, MAX_DIGITS)))
    chosen = {slot: dice.choice(words) for slot, words in _CHOICES.items()}
    return dice.choice(_COMMANDS).format(**chosen)
