"""Every attention kernel that this machine has, against softmax attention and its autograd gradient."""

import math
from dataclasses import replace

import pytest
import torch

from ttv_train.ops import attention as ops
from ttv_train.ops.attention_kernels import KERNELS, AttentionBlock, select_kernel

LOCAL_KERNELS = [kernel for kernel in KERNELS if kernel.fits("cpu", torch.float64, 8, masked=True)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def _draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _softmax_attention(query, key, value, key_mask, scale):
    groups = query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(groups, 1).mT * scale
    if key_mask is not None:
        logits = logits.masked_fill(~key_mask[:, None, None], -math.inf)
    return logits.softmax(-1) @ value.repeat_interleave(groups, 1), logits.logsumexp(-1)


def _block(dtype=torch.float64, key_heads=4, masked=False, queries=7, keys=9) -> AttentionBlock:
    mask = torch.arange(keys) < torch.tensor([[4], [keys]]) if masked else None
    shapes = [(2, 4, queries, 8), (2, key_heads, keys, 8), (2, key_heads, keys, 8)]
    return AttentionBlock(*(_draw(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)), mask, 0.3)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kernel", LOCAL_KERNELS, ids=lambda kernel: kernel.name)
def test_kernel_equals_softmax_attention(kernel, dtype, key_heads, masked):
    block = _block(dtype, key_heads, masked)
    leaves = [x.double().requires_grad_() for x in (block.query, block.key, block.value)]
    expected_out, expected_lse = _softmax_attention(*leaves, block.key_mask, block.scale)
    grad_out = _draw(2, 4, 7, 8, seed=9, dtype=dtype)
    expected_grads = torch.autograd.grad(expected_out, leaves, grad_out.double())

    out, lse = kernel.forward(block)
    grads = kernel.backward(block, grad_out, out, lse)
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    for actual, expected in zip((out, lse, *grads), (expected_out, expected_lse, *expected_grads), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("kernel", LOCAL_KERNELS, ids=lambda kernel: kernel.name)
def test_causal_kernel_equals_a_mask(kernel, key_heads):
    block = replace(_block(key_heads=key_heads, keys=7), causal=True)
    leaves = [x.clone().requires_grad_() for x in (block.query, block.key, block.value)]
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    logits = leaves[0] @ leaves[1].repeat_interleave(4 // key_heads, 1).mT * block.scale
    logits = logits.masked_fill(later, -math.inf)
    expected = logits.softmax(-1) @ leaves[2].repeat_interleave(4 // key_heads, 1)
    grad_out = _draw(2, 4, 7, 8, seed=9)
    expected_grads = torch.autograd.grad(expected, leaves, grad_out)

    out, lse = kernel.forward(block)
    grads = kernel.backward(block, grad_out, out, lse)
    for actual, wanted in zip((out, lse, *grads), (expected, logits.logsumexp(-1), *expected_grads), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", LOCAL_KERNELS, ids=lambda kernel: kernel.name)
def test_kernel_takes_an_expanded_gradient(kernel):
    block = _block()
    out, lse = kernel.forward(block)
    ones = torch.ones(()).double().expand(out.shape)
    for actual, expected in zip(
        kernel.backward(block, ones, out, lse), kernel.backward(block, ones.clone(), out, lse), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cuts", [(9,), (4, 5), (1, 8), (3, 3, 3), (0, 9), (9, 0)])
def test_merged_blocks_equal_the_whole(cuts):
    whole = _block()
    expected_out, expected_lse = ops.block_attention(whole)
    grad_out = _draw(2, 4, 7, 8, seed=9)
    expected_grads = ops.block_attention_backward(whole, grad_out, expected_out, expected_lse)

    blocks = [
        AttentionBlock(whole.query, key, value, None, whole.scale)
        for key, value in zip(whole.key.split(cuts, 2), whole.value.split(cuts, 2), strict=True)
    ]
    out, lse = ops.block_attention(blocks[0])
    for block in blocks[1:]:
        lse = ops.merge_(out, lse, *ops.block_attention(block))
    torch.testing.assert_close(out, expected_out, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-13)
    grads = [ops.block_attention_backward(block, grad_out, out, lse) for block in blocks]
    torch.testing.assert_close(sum(grad[0] for grad in grads), expected_grads[0], rtol=0, atol=1e-13)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([grad[i] for grad in grads], 2), expected_grads[i], rtol=0, atol=1e-13)


def test_query_without_keys_has_no_output_and_no_gradient():
    block = _block(masked=True)
    block.key_mask[0] = False
    out, lse = ops.block_attention(block)
    assert not out[0].any()
    assert (lse[0] == -math.inf).all()
    grads = ops.block_attention_backward(block, torch.ones_like(out), out, lse)
    assert not any(grad[0].any() for grad in grads)
    assert all(grad[1].isfinite().all() for grad in grads)


def test_merging_with_a_query_without_keys_changes_nothing():
    block = _block()
    out, lse = ops.block_attention(block)
    expected = out.clone()
    empty_out, empty_lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    torch.testing.assert_close(ops.merge_(out, lse, empty_out, empty_lse), lse)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(ops.merge_(empty_out, empty_lse, out, lse), lse)
    torch.testing.assert_close(empty_out, expected)


@pytest.mark.parametrize("masked", [False, True])
def test_kernel_attention_equals_sdpa(masked, monkeypatch):
    block = _block(key_heads=2, masked=masked)
    results = []
    for device_types in (frozenset(), frozenset({"cpu"})):
        monkeypatch.setattr(ops, "KERNEL_DEVICE_TYPES", device_types)
        leaves = [x.clone().requires_grad_() for x in (block.query, block.key, block.value)]
        out = ops.attention(*leaves, key_mask=block.key_mask)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for ours, sdpa in zip(*results, strict=True):
        torch.testing.assert_close(ours, sdpa, rtol=0, atol=1e-12)


def test_joint_key_mask_keeps_every_video_token():
    assert ops.joint_key_mask(None, 3) is None
    mask = ops.joint_key_mask(torch.tensor([[True, False]]), 3)
    assert mask.tolist() == [[True, False, True, True, True]]


def test_kernel_choice_follows_capabilities():
    assert select_kernel("cpu", torch.bfloat16, 64, masked=True).name == "cpu_flash"
    assert select_kernel("cuda", torch.bfloat16, 64, masked=False).name in {"flash_attn", "cuda_flash"}
    assert select_kernel("cuda", torch.bfloat16, 64, masked=True).name == "cuda_efficient"
    assert select_kernel("cuda", torch.float32, 64, masked=False).name == "cuda_efficient"
    assert select_kernel("cuda", torch.float64, 64, masked=False).name == "reference"
    assert select_kernel("cuda", torch.bfloat16, 63, masked=False).name == "reference"


def test_kernel_without_grouped_heads_gets_repeated_ones(monkeypatch):
    from dataclasses import replace

    block = _block(key_heads=2)
    out, lse = ops.block_attention(block)
    expected = (out, lse, *ops.block_attention_backward(block, out, out, lse))
    plain = replace(LOCAL_KERNELS[0], supports_grouped_heads=False)
    monkeypatch.setattr(ops, "select_kernel", lambda *args: plain)
    actual = (out, lse, *ops.block_attention_backward(block, out, out, lse))
    for x, y in zip((*ops.block_attention(block), *actual[2:]), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)
