"""A small video transformer with everything that sequence parallelism must get right: replicated patch, text and time
embeddings, joint attention with ragged text, cross attention, rotary-like positions, and modulation by time."""

import torch
from torch import nn

from ttv_train.ops.attention import attention
from ttv_train.parallel.sequence.base import SequenceParallel
from ttv_train.parallel.sequence.plan import SequencePlan

PLAN = SequencePlan(
    shard={"": {"positions": 0}, "blocks.0": {"hidden": 1}},
    join={"project_out": 1},
)


class Block(nn.Module):
    def __init__(self, channels: int, heads: int, sequence: SequenceParallel) -> None:
        super().__init__()
        self.heads, self.sequence = heads, sequence
        self.modulation = nn.Linear(channels, 2 * channels)
        self.norm = nn.LayerNorm(channels)
        self.to_qkv, self.to_text_qkv = nn.Linear(channels, 3 * channels), nn.Linear(channels, 3 * channels)
        self.to_out, self.to_text_out = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.cross_query, self.cross_key_value = nn.Linear(channels, channels), nn.Linear(channels, 2 * channels)
        self.mlp = nn.Linear(channels, channels)

    def _heads(self, x: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
        return tuple(part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in x.chunk(parts, dim=2))

    def forward(
        self,
        hidden: torch.Tensor,
        text: torch.Tensor,
        time: torch.Tensor,
        positions: tuple[torch.Tensor, torch.Tensor],
        text_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shift, scale = self.modulation(time)[:, None].chunk(2, dim=2)
        normed = self.norm(hidden) * (1 + scale) + shift
        q, k, v = self._heads(self.to_qkv(normed), 3)
        q, k = (x * positions[0] + x.roll(1, -1) * positions[1] for x in (q, k))
        video_out, text_out = self.sequence.attention(
            q, k, v, text=self._heads(self.to_text_qkv(self.norm(text)), 3), text_mask=text_mask
        )
        hidden = hidden + self.to_out(video_out.transpose(1, 2).flatten(2))
        text = text + self.to_text_out(text_out.transpose(1, 2).flatten(2))
        (query,) = self._heads(self.cross_query(hidden), 1)
        key, value = self._heads(self.cross_key_value(text), 2)
        hidden = hidden + attention(query, key, value, key_mask=text_mask).transpose(1, 2).flatten(2)
        return hidden + self.mlp(hidden).tanh(), text + self.mlp(text).tanh()


class JointModel(nn.Module):
    def __init__(self, sequence: SequenceParallel, channels: int = 20, heads: int = 5, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.embed_text, self.embed_time = (nn.Linear(size, channels) for size in (6, 4, 1))
        self.blocks = nn.ModuleList(Block(channels, heads, sequence) for _ in range(depth))
        self.project_out = nn.Linear(channels, 6)

    def forward(
        self,
        latents: torch.Tensor,
        text: torch.Tensor,
        timesteps: torch.Tensor,
        positions: tuple[torch.Tensor, torch.Tensor],
        text_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Latents (B, S, 6), text (B, L, 4), timesteps (B,), positions two of (S, D): (B, S, 6)."""
        hidden, text, time = self.embed(latents), self.embed_text(text), self.embed_time(timesteps[:, None])
        for block in self.blocks:
            # One argument by position, the others by keyword, as models do.
            hidden, text = block(hidden, text=text, time=time, positions=positions, text_mask=text_mask)
        return self.project_out(hidden)


def make_model(sequence: SequenceParallel) -> JointModel:
    """The same float64 weights on every rank."""
    torch.manual_seed(5)
    return JointModel(sequence).double()


def make_batch(tokens: int, seed: int = 0) -> dict[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    """Arguments of the model for two samples, of 2 and 4 text tokens, and the target of its output."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "latents": draw(2, tokens, 6),
        "text": draw(2, 4, 4),
        "timesteps": draw(2),
        "positions": (draw(tokens, 4), draw(tokens, 4)),
        "text_mask": torch.tensor([[True, True, False, False], [True] * 4]),
        "target": draw(2, tokens, 6),
    }


def local_loss(model: nn.Module, sequence: SequenceParallel, batch: dict) -> torch.Tensor:
    """Squared error over the tokens that this rank owns."""
    arguments = {name: value for name, value in batch.items() if name != "target"}
    prediction = model(**arguments)
    owned = sequence.owned(prediction.shape[1])
    return ((prediction - batch["target"])[:, owned] ** 2).sum()
