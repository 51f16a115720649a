"""Writes the toy data of sequence to sequence: rows of letters, and the same rows backwards.

    python toy_data.py toy_text_data

Files are where OpenSeq2Seq's configs expect them (`train/source.txt`, `train/target.txt`, ...) and where RETURNN's
`TranslationDataset` does (`source.train.gz`, `target.train.gz`, ...).
"""

from __future__ import annotations

import gzip
import random
import sys
from pathlib import Path

LETTERS = "abcdefghijkl"
PARTS = {"train": 4000, "dev": 200, "test": 200}


def rows(number: int, seed: str) -> list[str]:
    """Return random rows of 3 to 8 letters with spaces between them."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(LETTERS, k=draw.randint(3, 8))) for _ in range(number)]


def write(folder: Path) -> None:
    for part, number in PARTS.items():
        source = rows(number, part)
        target = [" ".join(reversed(row.split())) for row in source]
        (folder / part).mkdir(parents=True, exist_ok=True)
        for side, lines in (("source", source), ("target", target)):
            text = "".join(f"{line}\n" for line in lines)
            (folder / part / f"{side}.txt").write_text(text, encoding="utf-8")
            (folder / f"{side}.{part}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "toy_text_data"))
