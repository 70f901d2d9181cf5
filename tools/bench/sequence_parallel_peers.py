"""Attention of other libraries over a sequence that ranks share, as they are driven on a CPU.

Each factory takes (rank, degree) and returns a function of local query, key and value, (B, S_local, H, D) each, to the
local output of the same shape. Where a library's own kernel needs a GPU it is given torch's flash attention for the
CPU; its exchanges are left as they are.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.transpose(1, 2).contiguous() for x in tensors]


def local_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def deepspeed_ulysses(rank: int, degree: int) -> Attention:
    import deepspeed.comm
    from deepspeed.sequence.layer import DistributedAttention

    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed(dist_backend="gloo", verbose=False)
    module = DistributedAttention(local_attention, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return lambda q, k, v: module(q, k, v, 0)


def yunchang_ulysses(rank: int, degree: int) -> Attention:
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    module = UlyssesAttention(dist.group.WORLD, attn_type=AttnType.TORCH_EFFICIENT)
    module.attn_fn = local_attention
    return lambda q, k, v: module(q, k, v)


def _diffusers_config(rank: int, degree: int, ulysses: int) -> Any:
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    ring = degree // ulysses
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses))
    config.setup(rank, degree, torch.device("cpu"), mesh=mesh)
    return config


def diffusers_ulysses(rank: int, degree: int) -> Attention:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    config = _diffusers_config(rank, degree, degree)
    return lambda q, k, v: dispatch_attention_fn(q, k, v, backend="native", parallel_config=config)


def _diffusers_templated(rank: int, degree: int, ulysses: int) -> Attention:
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    def forward(
        ctx: Any, q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: Any = None, enable_gqa: bool = False, return_lse: bool = False, _save_ctx: bool = True, **_: Any,
    ) -> Any:  # fmt: skip
        out, lse = flash_forward(*heads_first(q, k, v))
        out, lse = out.transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous()
        if _save_ctx:
            ctx.save_for_backward(q, k, v, out, lse)
        return (out, lse) if return_lse else out

    def backward(ctx: Any, grad: Any, *args: Any, **given: Any) -> Any:
        # Ulysses passes nothing but the gradient; the ring passes the block and the merged output.
        names = ("query", "key", "value", "out", "lse")
        saved = dict(zip(names, ctx.saved_tensors, strict=False))
        q, k, v, out, lse = (saved[name] if given.get(name) is None else given[name] for name in names)
        grads = flash_backward(*heads_first(grad, q, k, v, out), lse.transpose(1, 2).contiguous(), 0.0, False)
        return tuple(x.transpose(1, 2) for x in grads)

    config = _diffusers_config(rank, degree, ulysses)
    return lambda q, k, v: _templated_context_parallel_attention(
        q, k, v, None, 0.0, False, None, False, False,
        forward_op=forward, backward_op=backward, _parallel_config=config,
    )  # fmt: skip


def diffusers_ring(rank: int, degree: int) -> Attention:
    return _diffusers_templated(rank, degree, 1)


def diffusers_usp(rank: int, degree: int) -> Attention:
    return _diffusers_templated(rank, degree, 2)


def _torch_ring(group: dist.ProcessGroup, rotate: str) -> Attention:
    import torch.distributed.tensor.experimental._context_parallel._attention as context_parallel

    context_parallel.set_rotate_method(rotate)
    context_parallel._cp_options.enable_load_balance = False

    def forward(q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False, scale: Any = None, **_: Any):
        return flash_forward(q, k, v, dropout_p, is_causal, scale=scale)

    def backward(
        grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, dropout_p: float = 0.0,
        is_causal: bool = False, scale: Any = None, **_: Any,
    ):  # fmt: skip
        return flash_backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, scale=scale)

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *qkv: torch.Tensor) -> torch.Tensor:
            context_parallel.set_rotate_method(rotate)
            out, lse = context_parallel._templated_ring_attention(
                group, 2, forward, *qkv, is_causal=False, dropout_p=0.0
            )[:2]
            ctx.save_for_backward(*qkv, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            context_parallel.set_rotate_method(rotate)
            return context_parallel._templated_ring_attention_backward(
                group, 2, backward, grad.contiguous(), "grad_out", *ctx.saved_tensors, is_causal=False, dropout_p=0.0
            )[:3]

    return lambda q, k, v: Ring.apply(*heads_first(q, k, v)).transpose(1, 2)


def torch_ring_allgather(rank: int, degree: int) -> Attention:
    return _torch_ring(dist.group.WORLD, "allgather")


def torch_ring_alltoall(rank: int, degree: int) -> Attention:
    return _torch_ring(dist.group.WORLD, "alltoall")


def yunchang_usp(rank: int, degree: int) -> Attention:
    """yunchang's all-to-all around torch's ring, since its own ring has no backward on a CPU."""
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType

    set_seq_parallel_pg(2, degree // 2, rank, degree)
    module = LongContextAttention(ring_impl_type="basic_pytorch", attn_type=AttnType.TORCH_EFFICIENT)
    module.ring_attn_fn = lambda q, k, v, group=None, **_: _torch_ring(group, "alltoall")(q, k, v).contiguous()
    return lambda q, k, v: module(q, k, v)


PEERS: dict[str, dict[str, Callable[[int, int], Attention]]] = {
    "ulysses": {
        "DeepSpeed DistributedAttention": deepspeed_ulysses,
        "diffusers, native": diffusers_ulysses,
        "yunchang, SDPA inside": yunchang_ulysses,
    },
    "ring": {
        "torch templated ring, allgather": torch_ring_allgather,
        "torch templated ring, alltoall": torch_ring_alltoall,
        "diffusers templated ring": diffusers_ring,
    },
    "usp": {"diffusers unified": diffusers_usp, "yunchang USP, torch ring inside": yunchang_usp},
}
