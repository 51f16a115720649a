"""Even split of positions into pieces: the one rule by which batches, draws and shares are cut without lengths."""

from __future__ import annotations


def even_sizes(num_items: int, num_pieces: int) -> list[int]:
    """Return the sizes of contiguous pieces that differ by at most one, larger ones first, as `np.array_split` has it.

    Planning (`data.partition`) uses it, and so does a task that adds items to a step: every rank knows the grains of a
    step and their pieces of the added items from the number of grains alone.
    """
    size, num_larger = divmod(num_items, num_pieces)
    return [size + 1] * num_larger + [size] * (num_pieces - num_larger)
