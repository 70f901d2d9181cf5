"""Kernels of devices that this machine lacks: what they are called with, and the shapes that come back.

torch's CUDA kernels run on meta tensors, which check their arguments and compute shapes. flash-attn and torch_npu are
stood in for by modules that follow their documented conventions and compute with the reference kernel.
"""

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ttv_train.ops.attention_kernels import AttentionBlock
from ttv_train.ops.attention_kernels.cuda import CUDA_EFFICIENT, CUDA_FLASH, FLASH_ATTN
from ttv_train.ops.attention_kernels.npu import NPU, STATISTICS
from ttv_train.ops.attention_kernels.reference import REFERENCE


def _block(
    dtype: torch.dtype, masked: bool, key_heads: int = 4, device: str = "cpu", causal: bool = False
) -> AttentionBlock:
    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(2, tokens, heads, 16, dtype=dtype, device=device).transpose(1, 2)

    if causal:
        return AttentionBlock(draw(4, 7), draw(key_heads, 7), draw(key_heads, 7), None, 0.3, causal=True)
    mask = torch.arange(9, device=device) < torch.tensor([[4], [9]], device=device) if masked else None
    return AttentionBlock(draw(4, 7), draw(key_heads, 9), draw(key_heads, 9), mask, 0.3)


@pytest.mark.parametrize(
    ("kernel", "dtype", "masked", "key_heads"),
    [
        (CUDA_FLASH, torch.bfloat16, False, 4),
        (CUDA_FLASH, torch.bfloat16, False, 2),
        (CUDA_EFFICIENT, torch.bfloat16, False, 4),
        (CUDA_EFFICIENT, torch.bfloat16, True, 4),
        (CUDA_EFFICIENT, torch.float32, True, 4),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
@pytest.mark.parametrize("causal", [False, True])
def test_torch_cuda_kernels_take_their_arguments(kernel, dtype, masked, key_heads, causal):
    block = _block(dtype, masked, key_heads, "meta", causal)
    out, lse = kernel.forward(block)
    assert out.shape == block.query.shape
    assert (lse.shape, lse.dtype) == ((2, 4, 7), torch.float32)
    grads = kernel.backward(block, torch.empty_like(out), out, lse)
    assert [grad.shape for grad in grads] == [block.query.shape, block.key.shape, block.value.shape]


def _heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _stand_in_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 2.7 and later: tensors (B, tokens, heads, D), gradients written to what the caller provides."""
    interface = ModuleType("flash_attn.flash_attn_interface")

    def forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
        out, lse = REFERENCE.forward(AttentionBlock(*_heads_first(q, k, v), None, softmax_scale, causal))
        return out.transpose(1, 2).contiguous(), lse, None, None

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
        assert softmax_lse.is_contiguous()
        block = AttentionBlock(*_heads_first(q, k, v), None, softmax_scale, causal)
        grads = REFERENCE.backward(block, *_heads_first(dout, out), softmax_lse)
        for target, grad in zip((dq, dk, dv), grads, strict=True):
            assert target.is_contiguous()
            target.copy_(grad.transpose(1, 2))

    interface._flash_attn_forward, interface._flash_attn_backward = forward, backward
    package = ModuleType("flash_attn")
    package.flash_attn_interface = interface
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)


def _stand_in_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_npu: a mask is True where a key is left out; a row's maximum and sum stand for its log-sum-exp."""
    module = ModuleType("torch_npu")

    def block_of(query, key, value, atten_mask, scale):
        if atten_mask is None:
            return AttentionBlock(query, key, value, None, scale)
        assert atten_mask.dtype == torch.bool
        if atten_mask.dim() == 2:
            assert torch.equal(atten_mask, torch.ones(7, 7).triu(1).bool())
            return AttentionBlock(query, key, value, None, scale, causal=True)
        assert atten_mask.shape == (2, 1, 7, 9)
        return AttentionBlock(query, key, value, ~atten_mask[:, 0, 0], scale)

    def npu_fusion_attention(query, key, value, head_num, input_layout, *, atten_mask, scale):
        assert (head_num, input_layout) == (query.shape[1], "BNSD")
        out, lse = REFERENCE.forward(block_of(query, key, value, atten_mask, scale))
        maximum = (lse - 0.5)[..., None].expand(-1, -1, -1, STATISTICS)
        return out, maximum, torch.full_like(maximum, 0.5).exp(), None, 0, 0, 0

    def npu_fusion_attention_grad(
        query,
        key,
        value,
        dy,
        head_num,
        input_layout,
        *,
        atten_mask,
        softmax_max,
        softmax_sum,
        attention_in,
        scale_value,
    ):
        assert (head_num, input_layout) == (query.shape[1], "BNSD")
        assert softmax_max.shape == softmax_sum.shape == (2, 4, 7, STATISTICS)
        lse = (softmax_max + softmax_sum.log())[..., 0]
        block = block_of(query, key, value, atten_mask, scale_value)
        return *REFERENCE.backward(block, dy, attention_in, lse), None, None

    module.npu_fusion_attention, module.npu_fusion_attention_grad = npu_fusion_attention, npu_fusion_attention_grad
    monkeypatch.setitem(sys.modules, "torch_npu", module)


@pytest.mark.parametrize(
    ("kernel", "stand_in", "masked", "causal"),
    [
        (FLASH_ATTN, _stand_in_flash_attn, False, False),
        (FLASH_ATTN, _stand_in_flash_attn, False, True),
        (NPU, _stand_in_torch_npu, False, False),
        (NPU, _stand_in_torch_npu, True, False),
        (NPU, _stand_in_torch_npu, False, True),
    ],
    ids=["flash_attn", "flash_attn-causal", "npu", "npu-masked", "npu-causal"],
)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_packages_are_called_by_their_conventions(kernel, stand_in, masked, causal, key_heads, monkeypatch):
    stand_in(monkeypatch)
    block = _block(torch.float32, masked, key_heads, causal=causal)
    out, lse = kernel.forward(block)
    expected_out, expected_lse = REFERENCE.forward(block)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)
    grad_out = torch.randn_like(out)
    for actual, expected in zip(
        kernel.backward(block, grad_out, out, lse), REFERENCE.backward(block, grad_out, out, lse), strict=True
    ):
        torch.testing.assert_close(actual, expected)


SCHEMAS = Path(__file__).parents[2] / "golden" / "npu_fusion_attention.txt"


@pytest.mark.parametrize("name", ["npu_fusion_attention", "npu_fusion_attention_grad"])
def test_npu_operators_have_the_arguments_that_are_passed(name):
    """Against the schemas that torch_npu 2.13 declares."""
    (schema,) = (line for line in SCHEMAS.read_text().splitlines() if line.startswith(f"{name}("))
    declared = set(re.findall(r"(\w+)(?:=[^,)]*)?(?=, |\))", schema.split(" -> ")[0]))
    source = inspect.getsource(sys.modules[NPU.forward.__module__])
    call = source[source.index(f"torch_npu.{name}(") :].split("\n    )\n")[0]
    passed = re.findall(r"^\s+(\w+)=", call, flags=re.MULTILINE)
    assert passed
    assert set(passed) <= declared
