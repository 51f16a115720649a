"""A notebook's cell, played by hand."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Cell:
    """Displays of a notebook's cell, by number, replaced in place."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, str]] = []
        self.history: list[dict[str, str]] = []
        """All that was ever shown."""

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        number = len(self.outputs)
        self.outputs.append(data)
        self.history.append(data)

        def update(data: dict[str, str], *, raw: bool) -> None:
            assert raw
            self.outputs[number] = data
            self.history.append(data)

        return SimpleNamespace(update=update)


def fake_ipython(monkeypatch: pytest.MonkeyPatch, shell: Any) -> Cell:
    cell, module = Cell(), ModuleType("IPython")
    module.display = SimpleNamespace(display=cell.display)  # type: ignore[attr-defined]
    module.get_ipython = lambda: shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", module)
    return cell
