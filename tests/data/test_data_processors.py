import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor, ViTConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from rankwise.data import PlainImageProcessor, load_image_processor
from rankwise.data.processors import plain_processor
from rankwise.errors import InputError


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


ORACLES = [
    ViTImageProcessorPil(size={"height": 6, "width": 9}),
    ViTImageProcessorPil(size={"height": 6, "width": 6}, do_normalize=False),
    ViTImageProcessorPil(size={"height": 6, "width": 6}, do_rescale=False, resample=3),
    CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 6, "width": 6}),
    CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=7),
]


@pytest.mark.parametrize("oracle", ORACLES)
@given(width=st.integers(8, 40), height=st.integers(8, 40))
def test_settings_mean_what_they_mean_to_transformers(oracle, width: int, height: int) -> None:
    image = picture(width, height)
    wanted = oracle(images=[image], return_tensors="pt")["pixel_values"]
    got = plain_processor(oracle.to_dict())(images=[image])["pixel_values"]
    assert got.dtype == torch.float32
    # both are a handful of float32 operations on values of at most 255/0.2 in size: 8 roundings of 6e-8 each
    assert torch.allclose(got, wanted, rtol=0, atol=8 * 6e-8 * 255 / 0.2)


@pytest.mark.parametrize(
    ("size", "target"),
    [(8, (8, 8)), ({"height": 4, "width": 6}, (4, 6)), ([4, 6], (4, 6)), ({"shortest_edge": 5}, 5)],
)
def test_forms_of_size(size, target) -> None:
    assert plain_processor({"size": size}).size == target


@pytest.mark.parametrize("settings", [{"size": {"longest_edge": 9}}, {"do_resize": False}])
def test_unknown_form_of_size(settings) -> None:
    with pytest.raises(
        InputError, match=r"size in preprocessor_config\.json: expected a number, .*Install torchvision"
    ):
        plain_processor(settings)


def test_pictures_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in size"):
        PlainImageProcessor(size=4)(images=[picture(4, 8), picture(4, 9)])


def model_folder(folder: Path, settings: dict | None) -> Path:
    ViTConfig(image_size=32).save_pretrained(folder)
    if settings is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("kind", ["ViTImageProcessor", "ViTImageProcessorFast", "CLIPImageProcessor"])
def test_the_pillow_class_of_transformers_is_taken_where_there_is_one(kind: str, tmp_path: Path) -> None:
    settings = {"image_processor_type": kind, "size": {"height": 12, "width": 10}, "crop_size": 10}
    processor = load_image_processor(model_folder(tmp_path, settings))
    assert type(processor).__module__.startswith("transformers.")
    assert processor.backend == "pil"
    made = processor(images=[picture(40, 30)], return_tensors="pt")
    assert made["pixel_values"].shape[0] == 1


def test_settings_without_a_pillow_class_are_followed_and_said(tmp_path: Path) -> None:
    settings = {"image_processor_type": "NowhereImageProcessor", "size": 10, "image_mean": [0.1, 0.2, 0.3]}
    folder = model_folder(tmp_path, settings)
    with pytest.raises(ValueError, match=r"NowhereImageProcessor|Unrecognized"):
        AutoImageProcessor.from_pretrained(folder)  # else this test would show nothing
    processor = load_image_processor(folder)
    assert processor == PlainImageProcessor(
        size=(10, 10),
        mean=[0.1, 0.2, 0.3],
        note=f"pictures prepared by Rankwise from the settings of {folder}",
    )


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(image_size=32),
        SimpleNamespace(image_size=(32, 32)),
        SimpleNamespace(vision_config=SimpleNamespace(image_size=32)),
    ],
)
def test_without_settings_the_image_size_of_the_model_is_followed_and_said(config, tmp_path: Path) -> None:
    processor = load_image_processor(model_folder(tmp_path, None), config=config)
    assert processor.size == (32, 32)
    assert "has no image processor: pictures resized to 32×32, mean and std 0.5" in processor.note


@pytest.mark.parametrize("config", [None, SimpleNamespace(hidden_size=8)])
def test_neither_settings_nor_image_size(config, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a model that reads pictures, got neither.*Give --text"):
        load_image_processor(model_folder(tmp_path, None), config=config)
