import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from ttv_train import prompts
from ttv_train.data.shards import CorruptSampleError
from ttv_train.errors import UserError


def test_an_image_is_cropped_around_its_middle(tmp_path):
    pixels = np.zeros((40, 100, 3), dtype=np.uint8)
    pixels[:, 25:75] = 200
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    image = prompts.read_image(tmp_path / "wide.png", 20, 20)
    assert image.shape == (20, 20, 3)
    assert image.dtype == torch.uint8
    assert (image == 200).all()


def test_only_common_formats_are_tried(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "image.bmp")
    with pytest.raises(UserError, match=r"image\.bmp: not an image that can be read: .*PNG, JPEG or WebP"):
        prompts.read_image(tmp_path / "image.bmp", 8, 8)


def test_a_long_dataset_is_sampled_in_part(tmp_path, caplog):
    store = SimpleNamespace(entries=[SimpleNamespace(caption=f"caption {i}") for i in range(40)])
    with caplog.at_level(logging.INFO):
        assert len(prompts.captions(store)) == prompts.DEFAULT_PROMPTS
    assert "16 of the dataset's 40 captions" in caplog.text


def test_a_corrupt_sample_is_named(tmp_path):
    class CorruptStore:
        path = "runs/latents"

        def read(self, entry):
            raise CorruptSampleError("key/0", "shards/a.tar", "its bytes are not those that were written")

    with pytest.raises(UserError, match=r"latents\.path runs/latents: sample key/0 in shards/a\.tar.*encode"):
        prompts.stored_prompts(CorruptStore(), [SimpleNamespace(caption="A dog")])
