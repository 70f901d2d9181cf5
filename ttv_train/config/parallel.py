"""How the work is spread over ranks."""

from typing import Literal

from pydantic import Field, model_validator

from ttv_train.config.section import Section


class SequenceParallelConfig(Section):
    """How the tokens of one video are split over ranks."""

    scheme: Literal["none", "ulysses", "ring", "usp", "dsp"] = "none"
    """`ulysses` exchanges tokens for heads around every attention, and sends least; `ring` passes keys and values
    around, for more ranks than heads; `usp` is ulysses within groups of ranks and ring between them; `dsp` is for
    families that attend to space and time in turn."""
    degree: int = Field(1, ge=1)
    """Ranks that share one sequence; it must divide the number of ranks."""
    ulysses_degree: int | None = Field(None, ge=1)
    """Ranks of one ulysses group of `usp`; the rest of `degree` is ring."""
    ring_mode: Literal["auto", "rotate", "gather"] = "auto"
    """`rotate` overlaps transfers with compute and keeps two blocks of keys; `gather` sends two thirds of its bytes at
    once and keeps all keys. `auto` gathers where a rank has too few tokens to hide a transfer behind, or key/value
    heads are so few that all keys are no more than its own queries. Of `ring` and `usp`."""
    ring_gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which key and value gradients add up around the ring. `bfloat16` halves their bytes and rounds at each
    rank."""

    @model_validator(mode="after")
    def _degree_fits_scheme(self) -> "SequenceParallelConfig":
        if self.scheme == "none" and self.degree != 1:
            raise ValueError(f"degree {self.degree} needs a scheme: set parallel.sequence.scheme to ulysses")
        if self.scheme == "usp" and (self.ulysses_degree is None or self.degree % self.ulysses_degree):
            raise ValueError(
                f"scheme usp needs a ulysses_degree that divides degree {self.degree}, not {self.ulysses_degree}"
            )
        if self.scheme != "usp" and self.ulysses_degree is not None:
            raise ValueError(f"ulysses_degree belongs to scheme usp, not {self.scheme}: leave it out")
        if self.scheme not in ("ring", "usp"):
            for key in ("ring_mode", "ring_gradient_dtype"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} belongs to schemes ring and usp, not {self.scheme}: leave it out")
        return self


class ParallelConfig(Section):
    """How the work is spread over ranks."""

    sequence: SequenceParallelConfig = SequenceParallelConfig()
    reshard_after_forward: bool = True
    """True frees gathered parameters after the forward pass (ZeRO-3); False keeps them until backward (ZeRO-2)."""
    activation_checkpointing: bool = False
    """Recompute each transformer block in backward instead of keeping its activations."""
    keep_attention: bool = False
    """With `activation_checkpointing`: keep what attention and its exchanges return, which costs a few hidden tensors
    per block; recomputing a block then repeats neither."""
    timeout_seconds: float = Field(600.0, gt=0)
    """A collective that takes longer fails on every rank."""
