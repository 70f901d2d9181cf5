"""Layers of video VAEs on a part of a clip: what each computes equals its share of the whole clip's result.

Shapes: x is (B, C, T, H, W). Convolutions are causal in time: a kernel of k frames sees k - 1 frames of the past.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ttv_train.encoders.vae.split import ROWS, TIME, PadMode, Split, TimeSplit


def causal_conv(
    conv: nn.Conv3d,
    x: torch.Tensor,
    split: Split,
    *,
    time_mode: PadMode,
    space_mode: PadMode,
    past: torch.Tensor | None = None,
    is_padded: bool = True,
) -> torch.Tensor:
    """A causal 3-D convolution, padded by (k - 1) / 2 rows and columns.

    Along the split, what the kernel sees of other ranks comes from them: in time ``k - stride`` frames of the previous
    rank, in space ``(k - 1) / 2`` rows above and ``(k + 1) / 2 - stride`` below.

    Args:
        conv: holds weights, stride and dilation; its own padding is not looked at.
        time_mode, space_mode: how the clip's first frame and the frame's edges are padded.
        past: frames (B, C, *, H, W) of this rank's rows that precede x, where the VAE keeps them itself.
        is_padded: whether the first k - 1 frames of the clip are padding; without it they yield no frame.
    """
    (k_t, k_h, k_w), stride = conv.kernel_size, conv.stride
    if past is not None:
        x = torch.cat([past, x], TIME)
    pad_h, pad_w = (k_h - 1) // 2, (k_w - 1) // 2
    if split.dim == ROWS and k_h > 1:
        x, pad_h = split.padded(x, pad_h, k_h - stride[1] - pad_h, space_mode), 0
    missing = k_t - 1 - (0 if past is None else past.shape[TIME]) if is_padded else 0
    before = x[:, :, :0]
    if k_t > 1 and isinstance(split, TimeSplit):
        before = split.preceding(x, k_t - stride[0], _past_padding(x, missing, time_mode))
    elif missing > 0:
        before = _past_padding(x, missing, time_mode)
    length = before.shape[TIME]
    if length + x.shape[TIME] < k_t:
        return x.new_empty(x.shape[0], conv.out_channels, 0, *x.shape[3:])
    if space_mode == "replicate" and (pad_h or pad_w):
        # One copy of x for all of its padding.
        x = F.pad(x, (pad_w, pad_w, pad_h, pad_h, length, 0), mode="replicate")
        x[:, :, :length] = F.pad(before, (pad_w, pad_w, pad_h, pad_h, 0, 0), mode="replicate")
        pad_h = pad_w = 0
    elif length:
        x = torch.cat([before, x], TIME)
    del before  # It is in x now, and the convolution is where memory peaks.
    return F.conv3d(x, conv.weight, conv.bias, stride, (0, pad_h, pad_w), conv.dilation, conv.groups)


def _past_padding(x: torch.Tensor, length: int, mode: PadMode) -> torch.Tensor:
    first = x[:, :, :1].expand(-1, -1, length, -1, -1)
    return first if mode == "replicate" else torch.zeros_like(first)


def downsampling_conv(conv: nn.Conv2d, x: torch.Tensor, split: Split) -> torch.Tensor:
    """A 3 x 3 convolution of stride 2 on every frame, with one row of zeros below and one column on the right."""
    x = split.padded(x, 0, 1, "zeros") if split.dim == ROWS else F.pad(x, (0, 0, 0, 1))
    x = F.pad(x, (0, 1))
    B, _, T, _, _ = x.shape
    frames = F.conv2d(x.transpose(1, 2).flatten(0, 1), conv.weight, conv.bias, conv.stride)
    return frames.unflatten(0, (B, T)).transpose(1, 2)


def group_norm(norm: nn.GroupNorm, x: torch.Tensor, split: Split) -> torch.Tensor:
    """Group norm with the statistics of all ranks that hold a part of the segment.

    Each sends two floats per group and sample, its mean and its sum of squared differences, and one with the number of
    positions; they are combined as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances" (1979).
    """
    normalized = []
    for start, stop, ranks in ((s.start, s.stop, s.ranks) for s in split.segments(x)):
        part = x.narrow(split.dim, start, stop - start)
        if len(ranks) == 1:
            normalized.append(F.group_norm(part, norm.num_groups, norm.weight, norm.bias, norm.eps))
        else:
            normalized.append(_shared_group_norm(norm, part, split, ranks))
    return normalized[0] if len(normalized) == 1 else torch.cat(normalized, split.dim)


def _shared_group_norm(norm: nn.GroupNorm, x: torch.Tensor, split: Split, ranks: Sequence[int]) -> torch.Tensor:
    B, C, G = x.shape[0], x.shape[1], norm.num_groups
    variance, mean = torch.var_mean(x.reshape(B, G, -1).float(), 2, correction=0)
    length = x.shape[split.dim]
    mine = torch.cat([mean.flatten(), variance.flatten() * length, mean.new_tensor([length])])
    found = torch.stack(split.exchange(mine, ranks)).double()
    lengths = found[:, -1].view(-1, 1, 1)
    means, squares = found[:, :-1].view(-1, 2, B, G).unbind(1)
    mean = (means * lengths).sum(0) / lengths.sum()
    variance = (squares + lengths * (means - mean) ** 2).sum(0) / lengths.sum()
    scale = torch.rsqrt(variance + norm.eps).repeat_interleave(C // G, 1)
    shift = -mean.repeat_interleave(C // G, 1) * scale
    if norm.affine:
        scale, shift = scale * norm.weight, shift * norm.weight + norm.bias
    scale, shift = (value.float().view(B, C, 1, 1, 1) for value in (scale, shift))
    return torch.addcmul(shift, x, scale).to(x.dtype)


def frame_causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, split: Split
) -> torch.Tensor:
    """Attention of every position to all positions of its frame and of the frames before it, over the whole tile.

    Frame by frame, so that no mask of all positions by all positions is ever made.

    Args:
        query, key, value: (B, C, T, H, W), this rank's part.
    """
    first_frame = sum(split.sizes[: split.rank]) if split.dim == TIME else 0
    key, value = split.gather(key), split.gather(value)
    frames = []
    for frame in range(query.shape[TIME]):
        seen = first_frame + frame + 1
        q, k, v = query[:, :, frame : frame + 1], key[:, :, :seen], value[:, :, :seen]
        attended = F.scaled_dot_product_attention(_tokens(q, heads), _tokens(k, heads), _tokens(v, heads))
        frames.append(attended.transpose(2, 3).flatten(1, 2).unflatten(2, q.shape[2:]))
    return torch.cat(frames, TIME)


def attention_per_frame(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, split: Split) -> torch.Tensor:
    """Attention with one head of every position to all positions of its own frame; the split is along rows.

    Args:
        query, key, value: (B, C, T, H, W), this rank's rows.
    """
    B, _, T, H, W = query.shape
    q, k, v = (
        part.transpose(1, 2).flatten(0, 1).flatten(2).transpose(1, 2).unsqueeze(1)
        for part in (query, split.gather(key), split.gather(value))
    )
    attended = F.scaled_dot_product_attention(q, k, v).squeeze(1)
    return attended.transpose(1, 2).unflatten(2, (H, W)).unflatten(0, (B, T)).transpose(1, 2)


def _tokens(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, C, T, H, W) as (B, heads, T * H * W, C / heads)."""
    return x.flatten(2).unflatten(1, (heads, -1)).transpose(2, 3)
