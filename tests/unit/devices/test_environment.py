import os
import subprocess
import sys

import pytest
import torch

from ttv_train.devices import get_backend
from ttv_train.devices.environment import prepare_environment
from ttv_train.errors import UserError


@pytest.mark.parametrize(
    ("backend", "variable"), [("cuda", "PYTORCH_CUDA_ALLOC_CONF"), ("npu", "PYTORCH_NPU_ALLOC_CONF")]
)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "expandable_segments:True"),
        ("", "expandable_segments:True"),
        ("max_split_size_mb:512", "max_split_size_mb:512,expandable_segments:True"),
        ("expandable_segments:False", "expandable_segments:False"),
    ],
)
def test_expandable_segments_are_added_unless_the_user_decided(backend, variable, given, expected):
    environ = {} if given is None else {variable: given}
    assert prepare_environment(backend, environ) == backend
    assert environ == {variable: expected}


def test_cpu_needs_nothing():
    environ = {}
    assert prepare_environment("cpu", environ) == "cpu"
    assert environ == {}


def test_the_environment_is_prepared_without_importing_torch():
    code = "import sys; from ttv_train.devices import prepare_environment as prepare; prepare('auto')"
    code += "; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert printed.stdout.strip() == "False"


def test_a_device_that_is_absent_is_refused_by_name():
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"device\.backend cuda"):
            get_backend("cuda")
    try:
        import torch_npu  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match=r"device\.backend npu.*ttv-train\[npu\]"):
            get_backend("npu")


def test_auto_finds_a_usable_backend():
    backend = get_backend("auto")
    assert backend.device(0).type == backend.name
    backend.synchronize()
    assert backend.peak_memory_bytes() >= 0
    stream = backend.side_stream()
    for _ in range(2):
        with stream:
            assert torch.ones(2, device=backend.device(0)).sum() == 2
