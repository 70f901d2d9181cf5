"""Keyed randomness: every draw is a function of what it is for, never of how many draws came before.

Noise, timesteps, caption dropout and data order are keyed by (seed, purpose, sample, step, ...), so a run has the same
loss curve on any number of ranks, under any sequence-parallel degree, with any micro-batching and after any restart.
The generator is Philox 4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by the
first 128 bits of SHA-256 over the parts.
"""

import hashlib
import json

import numpy as np
import torch

KeyPart = str | int


def keyed_generator(*parts: KeyPart) -> np.random.Generator:
    """A generator that depends on `parts` alone; parts are compared by type and value, so 1 and "1" differ."""
    digest = hashlib.sha256(json.dumps(parts, ensure_ascii=True).encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], dtype=np.uint64)))


def keyed_normal(shape: tuple[int, ...], *parts: KeyPart) -> torch.Tensor:
    """Standard normal noise of `shape`, float32 on the CPU."""
    return torch.from_numpy(keyed_generator(*parts).standard_normal(shape, dtype=np.float32))


def keyed_uniform(*parts: KeyPart) -> float:
    """One uniform draw in [0, 1)."""
    return float(keyed_generator(*parts).random())


def keyed_permutation(length: int, *parts: KeyPart) -> np.ndarray:
    """A permutation of ``range(length)``, int64 of shape ``(length,)``."""
    return keyed_generator(*parts).permutation(length)
