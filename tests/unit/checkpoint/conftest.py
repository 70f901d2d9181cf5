from pathlib import Path

import pytest

from tests.training_parts import Parts
from ttv_train.checkpoint.save import save_checkpoint


@pytest.fixture
def save(tmp_path):
    """Writes checkpoints of a tiny model, one process, no process group."""
    parts = Parts(seed=1)
    parts.train(1)

    def save(step: int, keep_last: int = 10) -> Path:
        return save_checkpoint(
            tmp_path / "checkpoints", step, parts.model, parts.optimizer, parts.ema, {"step": step}, keep_last
        )

    return save
