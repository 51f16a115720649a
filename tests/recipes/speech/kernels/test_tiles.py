"""How a convolution is cut into products: a window holds all that its tile sees, and no program is left over."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from paceline.recipes.speech.kernels import tiles

odd = st.integers(0, 60).map(lambda half: 2 * half + 1)
sizes = st.sampled_from([16, 32, 64])


@given(odd, st.sampled_from([1, 2, 4]), st.integers(1, 3), sizes, sizes)
def test_windows_hold_what_is_seen(kernel: int, stride: int, dilation: int, tile: int, chunk: int) -> None:
    way = tiles.Tiling(64, tile, chunk, 1)
    seen = {stride * n + dilation * k - tiles.padding(kernel, dilation) for n in range(tile) for k in range(kernel)}
    window = tiles.forward_window(kernel, stride, dilation, way)
    assert window.left % 8 == 0
    assert -window.left <= min(seen)
    assert max(seen) < window.chunks * chunk - window.left
    by = {
        (n - dilation * k + tiles.padding(kernel, dilation)) // stride
        for n in range(tile)
        for k in range(kernel)
        if (n - dilation * k + tiles.padding(kernel, dilation)) % stride == 0
    }
    window = tiles.backward_window(kernel, stride, dilation, way)
    assert window.left % 8 == 0
    assert all(-window.left <= output < window.chunks * chunk - window.left for output in by)


@given(st.integers(1, 5000), st.sampled_from([1, 7, 8, 14]))
def test_balanced(rows: int, most: int) -> None:
    way = tiles.balanced(tiles.Tiling(64, 64, 32, most), rows)
    blocks = math.ceil(rows / 64)
    programs = math.ceil(blocks / way.products)
    assert way.products <= most
    assert programs == math.ceil(blocks / most)  # no more programs than before
    assert programs * way.products - blocks < programs  # and each but the last as long as the others, to one block


def test_rows_are_aligned() -> None:
    assert [tiles.padded_frames(frames) for frames in (0, 1, 16, 17, 836)] == [0, 16, 16, 32, 848]


@given(odd, st.sampled_from([1, 2]), st.integers(1, 3), st.integers(1, 300))
def test_a_stream_reaches_one_tile_and_is_filled(kernel: int, stride: int, dilation: int, batch: int) -> None:
    way = tiles.streaming(kernel, stride, dilation, batch)
    if stride > 1 or tiles.padding(kernel, dilation) > 64 or batch < 43:
        assert way is None
    elif batch % 64 == 0:
        assert way is not None
    if way is not None:
        assert way.tile % way.chunk == 0
        assert batch / (way.rows * math.ceil(batch / way.rows)) >= 2 / 3


@given(odd, st.sampled_from([1, 2]), st.integers(1, 3), st.sampled_from([64, 256, 384, 512]), st.integers(1, 600))
def test_a_stream_backward_has_its_window_in_hand(
    kernel: int, stride: int, dilation: int, channels: int, batch: int
) -> None:
    reach, row = tiles.padding(kernel, dilation), 848
    way = tiles.backward_streaming(kernel, stride, dilation, channels, batch, row)
    if stride > 1 or reach > 48 or channels * batch < 128 * 64:
        assert way is None
    elif batch % 64 == 0 and channels * batch >= 256 * 64:
        assert way is not None
    if way is not None:
        left = tiles.window_start(kernel, dilation)
        assert left % 8 == 0
        assert reach <= left
        assert left + way.tile + reach <= way.wide + way.more
        assert way.rows * way.groups < batch + way.rows  # no program without an utterance


def test_a_stream_backward_is_for_whole_groups_of_long_utterances() -> None:
    def is_chosen(kernel: int, batch: int, row: int) -> bool:
        return tiles.backward_streaming(kernel, 1, 1, 512, batch, row) is not None

    assert [is_chosen(75, batch, 848) for batch in (40, 48, 64, 65, 100)] == [False, True, True, False, True]
    assert [is_chosen(33, batch, 848) for batch in (48, 59, 60, 64)] == [False, False, True, True]
    assert [is_chosen(75, 64, row) for row in (64, 256, 320, 848)] == [False, False, True, True]


def test_a_stream_backward_fills_the_machine() -> None:
    def groups(channels: int, batch: int) -> int:
        way = tiles.backward_streaming(51, 1, 1, channels, batch, 848)
        assert way is not None
        return way.groups

    assert [groups(channels, 64) for channels in (256, 512)] == [1, 1]
    assert [groups(channels, 256) for channels in (256, 384, 512)] == [4, 2, 4]  # 256, 768 and 512 of 264 at a time
