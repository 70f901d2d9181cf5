"""Where a model's sequence is cut and joined: data, one plan per model family."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SequencePlan:
    """The places where a sequence becomes local to a rank and whole again, by module path (`""` is the model).

    For example, a transformer whose first block receives all video tokens `(B, S, C)` and whose rotary table
    `(cos, sin)`, each `(S, D)`, is an argument of the model::

        SequencePlan(
            shard={"": {"image_rotary_emb": 0}, "transformer_blocks.0": {"hidden_states": 1}},
            join={"proj_out": 1},
        )
    """

    shard: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Module path -> {argument of its forward: dimension that is cut to the local tokens when the module is called}.
    A tuple or list of tensors is cut element by element; `None` and omitted arguments are left alone."""
    shard_output: Mapping[str, int] = field(default_factory=dict)
    """Module path -> dimension of its output that is cut to the local tokens, for what a model computes once and hands
    to every block, such as rotary tables. A tuple or list of tensors is cut element by element."""
    join: Mapping[str, int] = field(default_factory=dict)
    """Module path -> dimension of its output tensor on which the local tokens are joined."""
