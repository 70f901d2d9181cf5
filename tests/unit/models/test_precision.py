"""Float64 stays float64 where models ask for float32, and only there."""

import torch

from ttv_train.models.precision import KeepFloat64


def test_only_float64_is_kept():
    double, half = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bfloat16)
    with KeepFloat64():
        kept = [double.float(), double.to(torch.float32), double.to(dtype=torch.float32), double.to("cpu")]
        cast = [half.float(), half.to(torch.float32), double.to(torch.float32, copy=True).float() * half.float()]
        other = double.to(torch.bfloat16)
    assert {x.dtype for x in (*kept, cast[2])} == {torch.float64}
    assert {x.dtype for x in cast[:2]} == {torch.float32}
    assert other.dtype == torch.bfloat16
    assert double.float().dtype == torch.float32
