"""Pictures from a folder: choice of files, reading, and the image processor that prepares them."""

import json
import sys
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

import rankwise as rw
from rankwise.cli.load_images import (
    find_images,
    load_image_processor,
    open_image,
    plain_processor,
    read_images,
)
from rankwise.cli.load_model import load_model
from rankwise.errors import InputError


def first_pixels(images, return_tensors):
    return {"pixel_values": torch.tensor([image.getpixel((0, 0))[0] for image in images]), "names": ["x"]}


def paint(path: Path, color=(10, 20, 30), size=(2, 2), mode="RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path)
    return path


@pytest.fixture(scope="module")
def nine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nine")
    for i in range(9):
        paint(folder / f"class{i // 3}" / f"{i}.png", (i, i, i))
    return folder


def values(folder: Path, **sizes: int) -> list[int]:
    batches = list(read_images(folder, first_pixels, **sizes))
    assert all(set(batch) == {"pixel_values"} for batch in batches), "only tensors are kept"
    return [int(value) for batch in batches for value in batch["pixel_values"]]


@given(sequences=st.integers(1, 12), batch_size=st.integers(1, 12))
def test_batching_does_not_change_the_images(nine: Path, sequences: int, batch_size: int) -> None:
    one_by_one = values(nine, sequences=sequences, batch_size=1)
    assert values(nine, sequences=sequences, batch_size=batch_size) == one_by_one
    assert one_by_one == sorted(set(one_by_one))
    assert len(one_by_one) == min(sequences, 9)


def test_few_images_are_taken_from_every_class(nine: Path) -> None:
    assert values(nine, sequences=3) == [0, 3, 6]


def test_only_images_are_found_and_hidden_ones_are_not(tmp_path: Path) -> None:
    wanted = [paint(tmp_path / "a.png"), paint(tmp_path / "b" / "C.JPEG")]
    hidden = [paint(tmp_path / ".cache" / "d.png")]
    paint(tmp_path / "._a.png")
    (tmp_path / "labels.csv").write_text("a,b")
    (tmp_path / "folder.png").mkdir()
    assert find_images(tmp_path) == wanted
    assert find_images(tmp_path / ".cache") == hidden  # named by the user
    assert find_images(tmp_path / "labels.csv") == [tmp_path / "labels.csv"]


@pytest.mark.parametrize(
    ("mode", "color", "rgb"),
    [
        ("L", 7, (7, 7, 7)),
        ("1", 1, (255, 255, 255)),
        ("RGBA", (1, 2, 3, 255), (1, 2, 3)),
        ("LA", (9, 255), (9, 9, 9)),
        ("P", 0, (0, 0, 0)),
        ("CMYK", (0, 0, 0, 255), (0, 0, 0)),
        ("I;16", 257 * 40, (40, 40, 40)),
        ("I", 257 * 40, (40, 40, 40)),
    ],
)
def test_every_mode_becomes_rgb(mode: str, color, rgb: tuple[int, ...], tmp_path: Path) -> None:
    name = "a.tif" if mode in ("I", "CMYK") else "a.png"
    image = open_image(paint(tmp_path / name, color, mode=mode))
    assert image.mode == "RGB"
    assert image.getpixel((0, 0)) == rgb


def test_a_camera_held_sideways_and_the_first_frame(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    Image.new("RGB", (4, 2)).save(tmp_path / "a.jpg", exif=exif)
    assert open_image(tmp_path / "a.jpg").size == (2, 4)
    frames = [Image.new("RGB", (2, 2), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert open_image(tmp_path / "a.gif").getpixel((0, 0)) == (255, 0, 0)


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("damage", [lambda png: b"no picture", lambda png: png[:600], lambda png: b""])
def test_an_unreadable_image_is_named(damage, tmp_path: Path) -> None:
    paint(tmp_path / "a.png")
    noise(64, 64).save(tmp_path / "bad.png")
    (tmp_path / "bad.png").write_bytes(damage((tmp_path / "bad.png").read_bytes()))
    batches = read_images(tmp_path, first_pixels, batch_size=1)
    next(batches)
    with pytest.raises(InputError, match=r"bad\.png: expected an image, got a file that cannot be read"):
        next(batches)


def test_images_without_a_white_or_too_large_are_refused(tmp_path, monkeypatch) -> None:
    Image.fromarray(np.ones((2, 2), dtype=np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(InputError, match=r"a\.tif.*mode F have no known white"):
        open_image(tmp_path / "a.tif")
    paint(tmp_path / "a.png", size=(9, 9))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9)
    with pytest.raises(InputError, match=r"a\.png: expected an image.*exceeds limit"):
        open_image(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: read_images(folder / "no", dict), r"no: .* got no such folder\. Check the path"),
        (lambda folder: read_images(folder, dict), r"1 files, none an image\. .* that end in \.bmp"),
        (
            lambda _: plain_processor({"size": {"longest_edge": 9}}),
            r"size in preprocessor_config\.json: .*got",
        ),
        (load_image_processor, r"a model that reads images, got neither.*Pass --text"),
    ],
)
def test_wrong_folders_and_settings_are_refused(make, says: str, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("a")
    with pytest.raises(InputError, match=says):
        make(tmp_path)


@pytest.mark.parametrize(
    "processor", [plain_processor({"size": {"shortest_edge": 4}}), ViTImageProcessorPil(do_resize=False)]
)
def test_images_that_stay_of_different_sizes(processor, tmp_path: Path) -> None:
    paint(tmp_path / "a.png", size=(4, 8))
    paint(tmp_path / "b.png", size=(4, 6))
    with pytest.raises(InputError, match=r"begins with .*a\.png: .*Use --batch-size 1"):
        next(read_images(tmp_path, processor))
    assert len(list(read_images(tmp_path, processor, batch_size=1))) == 2


def test_without_pillow(nine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"the package PIL, .*pip install 'rankwise\[images\]'"):
        read_images(nine, dict)


ORACLES = [
    ViTImageProcessorPil(size={"height": 6, "width": 9}),
    ViTImageProcessorPil(size={"height": 6, "width": 6}, do_normalize=False),
    ViTImageProcessorPil(size={"height": 6, "width": 6}, do_rescale=False, resample=3),
    CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 6, "width": 6}),
    CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=7),
]


@pytest.mark.parametrize("oracle", ORACLES)
@given(width=st.integers(8, 40), height=st.integers(8, 40))
def test_settings_are_followed_as_by_their_own_class(oracle, width: int, height: int) -> None:
    given = {"images": [noise(width, height)], "return_tensors": "pt"}
    made = plain_processor(oracle.to_dict())(**given)
    assert torch.equal(made["pixel_values"], oracle(**given)["pixel_values"])


@pytest.mark.parametrize("size", [6, [6, 6], {"height": 6, "width": 6}])
@pytest.mark.parametrize("channels", [1, 3])
def test_forms_of_size_and_one_channel(size, channels: int, tmp_path: Path) -> None:
    paint(tmp_path / "a.png", (255, 255, 255), (9, 7))
    mode = "L" if channels == 1 else "RGB"
    [batch] = read_images(tmp_path, plain_processor({"size": size}, channels), mode=mode)
    assert torch.equal(batch["pixel_values"], torch.ones(1, channels, 6, 6)), "white is 1 by default"


def model_folder(folder: Path, settings: dict | None) -> Path:
    ViTConfig(image_size=32).save_pretrained(folder)
    if settings is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("kind", ["ViTImageProcessor", "ViTImageProcessorFast", "CLIPImageProcessor"])
def test_the_pillow_class_of_a_model_is_taken(kind: str, tmp_path: Path) -> None:
    settings = {"image_processor_type": kind, "size": {"height": 12, "width": 10}, "crop_size": 10}
    processor, note = load_image_processor(model_folder(tmp_path, settings))
    assert (type(processor).__name__.removesuffix("Pil"), note) == (kind.removesuffix("Fast"), "")
    assert processor.backend == "pil"


def test_settings_without_a_pillow_class_are_followed_with_a_note(tmp_path: Path) -> None:
    settings = {"image_processor_type": "NowhereImageProcessor", "size": 10, "image_mean": [0.1, 0.2, 0.3]}
    folder = model_folder(tmp_path, settings)
    with pytest.raises(ValueError, match=r"NowhereImageProcessor|Unrecognized"):
        AutoImageProcessor.from_pretrained(folder)  # else this test would show nothing
    processor, note = load_image_processor(folder)
    assert note == f"images prepared by Rankwise from the settings of {folder}"
    assert (processor.image_mean, processor.do_center_crop) == ((0.1, 0.2, 0.3), False)
    assert dict(processor.size) == {"height": 10, "width": 10}


@pytest.mark.parametrize("size", [{"image_size": 32}, {"image_size": (32, 32)}, {"vision_config": 32}])
def test_without_settings_the_image_size_of_the_model_is_followed(size, tmp_path: Path) -> None:
    config = SimpleNamespace(**size)
    if "vision_config" in size:
        config = SimpleNamespace(vision_config=SimpleNamespace(image_size=32))
    processor, note = load_image_processor(model_folder(tmp_path, None), config=config)
    assert dict(processor.size) == {"height": 32, "width": 32}
    assert "has no image processor: images resized to 32×32, mean and std 0.5" in note


def test_images_are_not_read_as_the_frames_of_one_video(nine: Path) -> None:
    def frames(images, return_tensors):
        return {"pixel_values": torch.zeros(1, len(images), 3, 4, 4)}

    said = r"expected a model of images, got one of videos: 4 images would be one video.*factory"
    with pytest.raises(InputError, match=said):
        next(read_images(nine, frames, sequences=8, batch_size=4))
    config = (
        "image_size=4, patch_size=2, num_frames=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=2"
    )
    factory = nine / "videos.py"
    factory.write_text(f"""
import torch, transformers
def build():
    model = transformers.VideoMAEModel(transformers.VideoMAEConfig({config}, intermediate_size=8)).eval()
    return model, [torch.randn(2, 4, 3, 4, 4)]
""")
    loaded = load_model(f"{factory}:build")
    assert rw.audit(loaded.model, loaded.batches).provenance.sequences == 2
