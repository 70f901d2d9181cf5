"""Exponential moving average of the weights, sharded like the model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ttv_train.parallel.parameters import local_shard, parameters_at_rest


class Ema:
    """Averages the trainable parameters of a model; each rank holds the average of its own shards, in float32.

    After step k (counted from 0) the average is d a + (1 - d) w with d = min(decay, (1 + k) / (10 + k)). The warm-up of
    d, as in TensorFlow's ExponentialMovingAverage, lets a short run forget its random start.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Starts the average at the weights that `model` has now, sharded or not.

        Raises:
            ValueError: a trainable parameter is not float32: averages need master weights, since bfloat16 rounds
                changes of 1 - decay away.
        """
        self.model = model
        self.decay = decay
        self._applied = False
        self._averages = {name: parameter.detach().clone() for name, parameter in self._parameters().items()}
        for name, average in self._averages.items():
            if average.dtype != torch.float32:
                raise ValueError(f"parameter {name} is {average.dtype}; the average is over float32 master weights")

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in parameters_at_rest(self.model).items() if value.requires_grad}

    def update(self, step: int) -> None:
        """Moves the average towards the weights after optimizer step `step`, counted from 0."""
        assert not self._applied, "the model holds the average now"
        decay = min(self.decay, (1 + step) / (10 + step))
        parameters = self._parameters()
        averages = [local_shard(average) for average in self._averages.values()]
        get_ema_multi_avg_fn(decay)(averages, [local_shard(parameters[name]) for name in self._averages], None)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averages by parameter name, float32, sharded like the model; they share this object's memory."""
        assert not self._applied, "the model holds the average now"
        return dict(self._averages)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Inside, `model` has the averaged weights: shards are exchanged in place, with one parameter's shard of extra
        memory. Neither `update` nor an optimizer step may happen inside."""
        assert model is self.model
        assert not self._applied, "the average is applied already"
        self._exchange()
        self._applied = True
        try:
            yield
        finally:
            self._applied = False
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        parameters = self._parameters()
        for name, average in self._averages.items():
            ours, theirs = local_shard(average), local_shard(parameters[name])
            kept = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(kept)
