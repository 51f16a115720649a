"""Pieces of a packing on the disk."""

from __future__ import annotations

from pathlib import Path

from paceline.data.packed.piece import Piece, read_piece


def test_a_piece_is_whole_or_not_there(tmp_path: Path) -> None:
    assert read_piece(tmp_path / "none.npz") is None
    (tmp_path / "text.npz").write_text("no")
    assert read_piece(tmp_path / "text.npz") is None
    assert len(Piece([], {}, {}, [])) == 0
