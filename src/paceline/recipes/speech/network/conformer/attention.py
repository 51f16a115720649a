"""Self-attention over the frames of padded utterances, with positions relative to each frame (Transformer-XL, arXiv
1901.02860, section 3.3).

The functions know only tensors, so that a kernel can stand in for them: queries, keys and values are (batch, head,
time, size), `lengths` are the frames of each utterance. No frame behind an utterance's end is seen by any other; what
these frames get themselves is finite and means nothing.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.recipes.speech.network.conformer.settings import ConformerSettings, Context

LONGEST_WAVE = 10_000.0
"""Of the sines that stand for positions, over 2 pi, in frames."""


def rel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    u_bias: Tensor,
    v_bias: Tensor,
    lengths: Tensor,
    *,
    visible: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return what each frame gathers: (batch, head, time, size).

    `p` is (head, 2 time - 1, size): the projected positions time - 1, ..., -(time - 1), a frame's own number less that
    of the one it looks at. `u_bias` and `v_bias` are (head, size). `visible` is (time, time) bool, true where a query
    may see a key; None: all of them.
    """
    time, size = q.shape[-2:]
    content = (q + u_bias[:, None]) @ k.transpose(-2, -1)
    position = shifted((q + v_bias[:, None]) @ p.transpose(-2, -1))
    scores = (content + position[..., :time]) * (1.0 / math.sqrt(size))
    return _gathered(scores, v, lengths, visible, dropout)


def attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, visible: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Return what each frame gathers, by content alone."""
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(q.shape[-1]))
    return _gathered(scores, v, lengths, visible, dropout)


def rel_local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    u_bias: Tensor,
    v_bias: Tensor,
    lengths: Tensor,
    *,
    dropout: float = 0.0,
) -> Tensor:
    """`rel_attention` within a window around each frame, in memory that grows with the length, not with its square.

    `p` is (head, 2 w + 1, size), of the positions w, ..., -w. Frames are taken in chunks of w, each with the w frames
    before and behind it.
    """
    batch, heads, time, size = q.shape
    w = p.shape[-2] // 2
    num_chunks = -(-time // w)
    rest = num_chunks * w - time
    queries = F.pad(q, (0, 0, 0, rest)).view(batch, heads, num_chunks, w, size)
    # (batch, head, chunk, size, 3 w)
    keys, values = (F.pad(each, (0, 0, w, w + rest)).unfold(2, 3 * w, w) for each in (k, v))
    content = (queries + u_bias[:, None, None]) @ keys
    position = (queries + v_bias[:, None, None]) @ p[:, None].transpose(-2, -1)  # (..., w, 2 w + 1)
    # Row i moves i places to the right, so that column j is that of the j-th of the 3 w keys.
    position = F.pad(position, (0, w)).flatten(-2)[..., : 3 * w * w].unflatten(-1, (w, 3 * w))
    scores = (content + position) * (1.0 / math.sqrt(size))

    column = torch.arange(3 * w, device=q.device)
    offset = column - w - torch.arange(w, device=q.device)[:, None]  # (w, 3 w)
    place = column - w + w * torch.arange(num_chunks, device=q.device)[:, None]  # (chunk, 3 w)
    inside = (place >= 0) & (place < lengths[:, None, None])  # (batch, chunk, 3 w)
    seen = inside[:, None, :, None, :] & (offset.abs() <= w)
    weights = dropped(_softmax(scores, seen), dropout).to(v.dtype)
    gathered: Tensor = weights @ values.transpose(-2, -1)
    return gathered.flatten(2, 3)[:, :, :time]


def shifted(scores: Tensor) -> Tensor:
    """(..., time, 2 time - 1) by position -> the same, whose first `time` columns are by key.

    Row i moves time - 1 - i places to the left; what comes in from the right belongs to other rows and is not read.
    """
    time, positions = scores.shape[-2:]
    moved = F.pad(scores, (1, 0)).flatten(-2)[..., time:]
    by_row: Tensor = moved.unflatten(-1, (time, positions))
    return by_row


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """(positions,) float32 -> (positions, width): sines and cosines in turn, in float32 as in NeMo, since large
    positions show the rounding of their product."""
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    waves = positions[:, None] * torch.exp(steps * -(math.log(LONGEST_WAVE) / width))
    return torch.stack([waves.sin(), waves.cos()], -1).flatten(1)


def visible_frames(context: Context, style: str, time: int, device: torch.device) -> Tensor | None:
    """(time, time) bool: which frames each one may see; None where it may see all."""
    before, after = context
    if context == (-1, -1):
        return None
    frame = torch.arange(time, device=device)
    if style == "chunked_limited" and after >= 0:
        chunk = frame // (after + 1)
        behind = chunk[:, None] - chunk
        seen = behind >= 0
        return seen & (behind <= before // (after + 1)) if before >= 0 else seen
    ahead = frame - frame[:, None]
    seen = ahead >= -before if before >= 0 else torch.ones_like(ahead, dtype=torch.bool)
    # Chunks without an end on the right see everything there.
    return seen & (ahead <= after) if after >= 0 else seen


def _gathered(scores: Tensor, v: Tensor, lengths: Tensor, visible: Tensor | None, dropout: float) -> Tensor:
    seen = (torch.arange(scores.shape[-1], device=scores.device) < lengths[:, None])[:, None, None]
    if visible is not None:
        seen = seen & visible
    weights = dropped(_softmax(scores, seen), dropout).to(v.dtype)
    return torch.matmul(weights, v)


def _softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Softmax over what is seen; of a frame that sees nothing it is some finite weights, where -inf would be no
    number."""
    return torch.softmax(torch.where(seen, scores, torch.finfo(scores.dtype).min), -1)


def dropped(x: Tensor, share: float, is_training: bool = True) -> Tensor:
    """Dropout; a share of 0 draws nothing, where torch's would draw a number for every value."""
    return F.dropout(x, share) if is_training and share > 0 else x


class SelfAttention(nn.Module):
    """Projections around one of the functions above."""

    def __init__(self, settings: ConformerSettings, biases: tuple[nn.Parameter, nn.Parameter] | None = None) -> None:
        """`biases` of content and position that all layers share; without them a layer has its own."""
        super().__init__()
        width, self.heads = settings.d_model, settings.n_heads
        self.kind, self.dropout = settings.self_attention_model, settings.dropout_att
        self.linear_q = nn.Linear(width, width, bias=settings.use_bias)
        self.linear_k = nn.Linear(width, width, bias=settings.use_bias)
        self.linear_v = nn.Linear(width, width, bias=settings.use_bias)
        self.linear_out = nn.Linear(width, width, bias=settings.use_bias)
        if self.kind != "abs_pos":
            self.linear_pos = nn.Linear(width, width, bias=False)
            self.pos_bias_u, self.pos_bias_v = biases or new_biases(settings)

    def forward(self, x: Tensor, positions: Tensor | None, lengths: Tensor, visible: Tensor | None) -> Tensor:
        """(batch, time, width) -> the same; `positions` are (positions, width), None where they are absolute."""
        q, k, v = (self._by_head(linear(x)) for linear in (self.linear_q, self.linear_k, self.linear_v))
        dropout = self.dropout if self.training else 0.0
        if positions is None:
            gathered = attention(q, k, v, lengths, visible=visible, dropout=dropout)
        else:
            p = self._by_head(self.linear_pos(positions))
            biases = self.pos_bias_u.to(q.dtype), self.pos_bias_v.to(q.dtype)
            if self.kind == "rel_pos_local_attn":
                gathered = rel_local_attention(q, k, v, p, *biases, lengths, dropout=dropout)
            else:
                gathered = rel_attention(q, k, v, p, *biases, lengths, visible=visible, dropout=dropout)
        y: Tensor = self.linear_out(gathered.transpose(-3, -2).flatten(-2))
        return y

    def _by_head(self, x: Tensor) -> Tensor:
        """(..., time, width) -> (..., head, time, size)."""
        by_head: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)
        return by_head


def new_biases(settings: ConformerSettings) -> tuple[nn.Parameter, nn.Parameter]:
    """Biases of content and position, (head, size) of zeros each."""
    shape = settings.n_heads, settings.d_model // settings.n_heads
    return nn.Parameter(
        torch.zeros(shape, dtype=torch.get_default_dtype(), device=torch.get_default_device())
    ), nn.Parameter(torch.zeros(shape, dtype=torch.get_default_dtype(), device=torch.get_default_device()))
