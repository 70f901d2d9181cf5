import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.encoders.tiny_models import save_text_encoder, save_tokenizer
from ttv_train.config import HashTextEncoderConfig, TransformersTextEncoderConfig
from ttv_train.encoders.text import build_text_encoder
from ttv_train.errors import UserError

CPU = torch.device("cpu")
CAPTIONS = ["a dog lies on the floor", "the rabbit wakes", ""]


def hashing(**settings):
    settings = {"hidden_size": 16, "max_length": 8, **settings}
    return build_text_encoder(HashTextEncoderConfig(kind="hash", **settings), CPU)


def pretrained(folder, **settings):
    settings = {"path": str(folder), "max_length": 8, "dtype": "float32", **settings}
    return build_text_encoder(TransformersTextEncoderConfig(kind="transformers", **settings), CPU)


@pytest.fixture(params=["hash", "T5EncoderModel", "UMT5EncoderModel"])
def encoder(request, tmp_path):
    if request.param == "hash":
        return hashing(dtype="bfloat16")
    save_text_encoder(tmp_path, request.param)
    return pretrained(tmp_path, dtype="bfloat16")


def test_shapes_types_and_masks_are_as_promised(encoder):
    embeds, mask = encoder.encode([*CAPTIONS, " ".join(["dog"] * 20)])
    assert embeds.shape == (4, encoder.max_length, encoder.hidden_size)
    assert embeds.dtype == torch.bfloat16
    assert not embeds.requires_grad
    assert mask.dtype == torch.bool
    assert torch.equal(mask.int().sort(descending=True, dim=1).values, mask.int())
    assert mask[:, 0].all()
    assert mask[3].all()


def test_captions_are_told_apart_whatever_their_company(encoder):
    embeds, _ = encoder.encode(CAPTIONS)
    assert not torch.equal(embeds[0], embeds[1])
    assert not torch.equal(embeds[0], embeds[2])
    assert torch.allclose(encoder.encode(CAPTIONS[1:2])[0][0].float(), embeds[1].float(), atol=2e-2)


def test_hash_pads_with_zeros_and_marks_the_empty_caption():
    embeds, mask = hashing().encode(CAPTIONS)
    assert mask.sum(dim=1).tolist() == [6, 3, 1]
    assert embeds[~mask].abs().max() == 0
    assert embeds[2, 0].abs().max() > 0
    assert torch.equal(hashing().encode(["  "])[0][0], embeds[2])


def test_hash_ignores_case_and_keeps_order_and_punctuation():
    def embed(caption):
        return hashing().encode([caption])[0]

    assert torch.equal(embed("A Dog"), embed("a dog"))
    assert not torch.equal(embed("dog bites man"), embed("man bites dog"))
    assert not torch.equal(embed("dog"), embed("dog!"))
    assert not torch.equal(embed("?"), embed(""))


def test_hash_has_unit_variance():
    embeds, mask = hashing(hidden_size=256).encode(CAPTIONS)
    assert embeds[mask].square().mean().item() == pytest.approx(1, abs=0.15)


def test_hash_is_the_same_in_another_process_and_for_ever():
    script = (
        "import torch; from ttv_train.config import HashTextEncoderConfig as Config;"
        "from ttv_train.encoders.text.hash import HashTextEncoder as Encoder;"
        "encoder = Encoder(Config(kind='hash', hidden_size=2, max_length=2), torch.device('cpu'));"
        "print(encoder.encode(['a dog'])[0][0].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    here = hashing(hidden_size=2, max_length=2).encode(["a dog"])[0][0]
    assert json.loads(done.stdout) == here.tolist()
    assert torch.allclose(here, torch.tensor([[-0.858825, 0.54012], [-0.072897, -0.889952]]), atol=1e-6)


def test_t5_attends_to_padding_as_cogvideox_does(tmp_path):
    reference = save_text_encoder(tmp_path)
    embeds, mask = pretrained(tmp_path).encode(["the rabbit wakes"])
    tokens = torch.tensor([[7, 9, 10, 1, 0, 0, 0, 0]])
    with torch.no_grad():
        expected = reference(tokens).last_hidden_state
    assert torch.allclose(embeds, expected, atol=1e-6)
    assert mask.tolist() == [[True] * 4 + [False] * 4]


def test_umt5_masks_padding_as_wan_does(tmp_path):
    reference = save_text_encoder(tmp_path, "UMT5EncoderModel")
    embeds, mask = pretrained(tmp_path).encode(["the rabbit wakes"])
    with torch.no_grad():
        expected = reference(torch.tensor([[7, 9, 10, 1]])).last_hidden_state
    assert torch.allclose(embeds[:, :4], expected, atol=1e-5)
    assert embeds[:, 4:].abs().max() == 0
    assert mask.sum() == 4


def test_fingerprint_knows_weights_tokenizer_length_and_dtype(tmp_path):
    save_text_encoder(tmp_path)
    settings = ({}, {"max_length": 9}, {"dtype": "bfloat16"})
    fingerprints = [pretrained(tmp_path, **setting).fingerprint for setting in settings]
    assert pretrained(tmp_path).fingerprint == fingerprints[0]
    weights = load_file(tmp_path / "model.safetensors")
    next(iter(weights.values())).add_(1)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fingerprints.append(pretrained(tmp_path).fingerprint)
    tokenizer = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(tokenizer.replace("rabbit", "hare"))
    fingerprints.append(pretrained(tmp_path).fingerprint)
    assert len(set(fingerprints)) == 5


def test_the_tokenizer_may_lie_elsewhere(tmp_path):
    save_text_encoder(tmp_path / "text_encoder")
    for file in (tmp_path / "text_encoder").glob("*tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match=r"text_encoder.tokenizer_path .*no vocabulary"):
        pretrained(tmp_path / "text_encoder")
    save_tokenizer(tmp_path / "tokenizer")
    elsewhere = pretrained(tmp_path / "text_encoder", tokenizer_path=str(tmp_path / "tokenizer"))
    assert elsewhere.encode(CAPTIONS)[1].sum(dim=1).tolist() == [7, 4, 1]


def test_other_architectures_are_refused(tmp_path):
    save_text_encoder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2Model"]}))
    with pytest.raises(UserError, match="GPT2Model is not a supported text encoder; supported: CLIPTextModel"):
        pretrained(tmp_path)


def test_weights_that_lack_a_tensor_are_refused(tmp_path):
    save_text_encoder(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["encoder.block.0.layer.0.SelfAttention.q.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"weights lack encoder.block.0.layer.0.SelfAttention.q.weight"):
        pretrained(tmp_path).encode(CAPTIONS)
