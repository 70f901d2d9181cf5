import json
import sys

import torch

from ttv_train.monitor.environment import write_environment


def test_the_command_and_the_versions_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ttv-train", "train", "--config", "my run.yaml"])
    values = json.loads(write_environment(tmp_path, backend="cpu", world_size=2).read_text())
    assert values["command"] == "ttv-train train --config 'my run.yaml'"
    assert (values["device"], values["processes"]) == ("cpu", 2)
    assert values["torch"] == torch.__version__
