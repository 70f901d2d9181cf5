import json

import pytest

from tests.unit.encoders.tiny_models import save_vae
from ttv_train.encoders.model_folder import find_folder, open_model_folder
from ttv_train.errors import UserError

STEM = "diffusion_pytorch_model"


@pytest.fixture
def folder(tmp_path):
    save_vae(tmp_path, "AutoencoderKLCogVideoX")
    return tmp_path


def test_finds_config_and_weights(folder):
    found = open_model_folder(str(folder), "vae.path", STEM)
    assert found.config["_class_name"] == "AutoencoderKLCogVideoX"
    assert found.weight_files == (folder / f"{STEM}.safetensors",)


def test_finds_weights_in_several_files(folder):
    whole = folder / f"{STEM}.safetensors"
    parts = [folder / f"{STEM}-0000{part}-of-00002.safetensors" for part in (1, 2)]
    for part in parts:
        part.write_bytes(whole.read_bytes())
    whole.unlink()
    index = folder / f"{STEM}.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": parts[1].name, "b": parts[0].name, "c": parts[1].name}}))
    assert open_model_folder(str(folder), "vae.path", STEM).weight_files == tuple(parts)
    parts[0].unlink()
    with pytest.raises(UserError, match=f"names '{parts[0].name}', which is not there"):
        open_model_folder(str(folder), "vae.path", STEM)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(UserError, match="elsewhere"):
        open_model_folder(str(folder), "vae.path", STEM)


@pytest.mark.parametrize("name", [f"{STEM}.bin", "model.ckpt", "pytorch_model.pt"])
def test_a_pickle_is_refused_by_name(folder, name):
    (folder / name).write_bytes(b"")
    with pytest.raises(UserError, match=f"vae.path .*{name} is a pickle"):
        open_model_folder(str(folder), "vae.path", STEM)


def test_remote_code_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))
    with pytest.raises(UserError, match="remote code"):
        open_model_folder(str(folder), "vae.path", STEM)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / f"{STEM}.safetensors").unlink(), f"no {STEM}.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "a JSON object is expected"),
    ],
)
def test_incomplete_folders_are_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(UserError, match=f"vae.path .*{message}"):
        open_model_folder(str(folder), "vae.path", STEM)


@pytest.mark.parametrize("path", ["", "/no/such/folder", "./vae", "name"])
def test_a_missing_folder_is_not_looked_up_on_the_hub(path):
    with pytest.raises(UserError, match=r"vae.path .*no such folder; give a folder, or a hub id"):
        open_model_folder(path, "vae.path", STEM)


def test_only_what_is_needed_is_fetched_from_the_hub(folder, monkeypatch):
    import huggingface_hub

    requests = []

    def snapshot_download(repository, *, allow_patterns):
        requests.append((repository, allow_patterns))
        return str(folder.parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_folder(f"owner/name/{folder.name}", "vae.path", ("config.json", "*.safetensors")) == folder
    assert requests == [("owner/name", [f"{folder.name}/config.json", f"{folder.name}/*.safetensors"])]


def test_an_unreachable_hub_is_a_user_error(monkeypatch):
    import huggingface_hub

    def snapshot_download(repository, *, allow_patterns):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UserError, match=r"vae.path owner/name/vae: .*not to be had from the hub: no connection$"):
        find_folder("owner/name/vae", "vae.path", ("config.json",))
