import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import ViTConfig
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from rankwise.data import PlainImageProcessor, find_images, read_images
from rankwise.data.images import open_image
from rankwise.errors import InputError

KEEP = PlainImageProcessor(size=(2, 2), mean=(0, 0, 0), std=(1, 1, 1), scale=1.0)
"""Pixels as they are."""


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


def values(batches) -> list[int]:
    return [int(image[0, 0, 0]) for batch in batches for image in batch["pixel_values"]]


@given(sequences=st.integers(1, 12), batch_size=st.integers(1, 12))
def test_batching_does_not_change_the_pictures(nine: Path, sequences: int, batch_size: int) -> None:
    one_by_one = values(read_images(nine, KEEP, sequences=sequences, batch_size=1))
    assert values(read_images(nine, KEEP, sequences=sequences, batch_size=batch_size)) == one_by_one
    assert one_by_one == sorted(set(one_by_one))
    assert len(one_by_one) == min(sequences, 9)


def test_few_pictures_are_taken_from_every_class(nine: Path) -> None:
    assert values(read_images(nine, KEEP, sequences=3)) == [0, 3, 6]


def test_processor_of_transformers(nine: Path) -> None:
    processor = ViTImageProcessorPil(size={"height": 4, "width": 4})
    [batch] = read_images(nine, processor, sequences=2)
    assert batch["pixel_values"].shape == (2, 3, 4, 4)
    assert batch["pixel_values"].dtype == torch.float32


def test_what_is_no_tensor_is_left_out(nine: Path) -> None:
    def processor(images, return_tensors):
        return {"pixel_values": torch.zeros(len(images), 3, 2, 2), "names": ["x"]}

    [batch] = read_images(nine, processor, sequences=2)
    assert set(batch) == {"pixel_values"}


def test_only_pictures_are_found_and_hidden_ones_are_not(tmp_path: Path) -> None:
    wanted = [paint(tmp_path / "a.png"), paint(tmp_path / "b" / "C.JPEG")]
    paint(tmp_path / "._a.png")
    paint(tmp_path / ".cache" / "d.png")
    (tmp_path / "labels.csv").write_text("a,b")
    (tmp_path / "folder.png").mkdir()
    assert find_images(tmp_path) == wanted


def test_a_hidden_folder_given_by_name_is_searched(tmp_path: Path) -> None:
    picture = paint(tmp_path / ".hidden" / "a.png")
    assert find_images(tmp_path / ".hidden") == [picture]


def test_one_picture(tmp_path: Path) -> None:
    paint(tmp_path / "a.png").rename(tmp_path / "picture")
    assert values(read_images(tmp_path / "picture", KEEP)) == [10]


@pytest.mark.parametrize(
    ("mode", "color", "rgb"),
    [
        ("L", 7, (7, 7, 7)),
        ("1", 1, (255, 255, 255)),
        ("RGBA", (1, 2, 3, 255), (1, 2, 3)),
        ("LA", (9, 255), (9, 9, 9)),
        ("P", 0, (0, 0, 0)),
        ("I;16", 257 * 40, (40, 40, 40)),
        ("I", 257 * 40, (40, 40, 40)),
    ],
)
def test_every_mode_becomes_rgb(mode: str, color, rgb: tuple[int, ...], tmp_path: Path) -> None:
    name = "a.tif" if mode == "I" else "a.png"
    image = open_image(paint(tmp_path / name, color, mode=mode))
    assert image.mode == "RGB"
    assert image.getpixel((0, 0)) == rgb


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    assert open_image(paint(tmp_path / "a.tif", (0, 0, 0, 255), mode="CMYK")).getpixel((0, 0)) == (0, 0, 0)


def test_one_channel(nine: Path) -> None:
    [batch] = read_images(nine, KEEP, sequences=2, mode="L")
    assert batch["pixel_values"].shape == (2, 1, 2, 2)


def test_camera_held_sideways(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    Image.new("RGB", (4, 2)).save(tmp_path / "a.jpg", exif=exif)
    assert open_image(tmp_path / "a.jpg").size == (2, 4)


def test_first_frame_of_a_moving_picture(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (2, 2), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert open_image(tmp_path / "a.gif").getpixel((0, 0)) == (255, 0, 0)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"no: expected a folder of pictures, got no such folder\. Check the path"
    ):
        read_images(tmp_path / "no", KEEP)


def test_folder_without_pictures(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("a")
    with pytest.raises(
        InputError, match=r"got 1 files, none a picture\. Give a folder with files ending in \.bmp"
    ):
        read_images(tmp_path, KEEP)


def whole_png(folder: Path) -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "noise.png")
    return (folder / "noise.png").read_bytes()


@pytest.mark.parametrize("damage", [lambda png: b"no picture", lambda png: png[:600], lambda png: b""])
def test_unreadable_picture_is_named(damage, tmp_path: Path) -> None:
    bad = tmp_path / "pictures" / "bad.png"
    paint(tmp_path / "pictures" / "a.png")
    bad.write_bytes(damage(whole_png(tmp_path)))
    batches = read_images(bad.parent, KEEP, batch_size=1)
    next(batches)
    with pytest.raises(
        InputError, match=r"bad\.png: expected a picture, got a file that cannot be read as one"
    ):
        next(batches)


def test_picture_of_numbers_without_a_white(tmp_path: Path) -> None:
    Image.fromarray(np.ones((2, 2), dtype=np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(InputError, match=r"a\.tif.*mode F have no known white"):
        open_image(tmp_path / "a.tif")


def test_picture_that_would_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paint(tmp_path / "a.png", size=(9, 9))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9)
    with pytest.raises(InputError, match=r"a\.png: expected a picture.*exceeds limit"):
        open_image(tmp_path / "a.png")


@pytest.mark.parametrize(
    "processor",
    [
        PlainImageProcessor(size=4),
        ViTImageProcessorPil(do_resize=False),
    ],
)
def test_pictures_that_stay_of_different_sizes(processor, tmp_path: Path) -> None:
    paint(tmp_path / "a.png", size=(4, 8))
    paint(tmp_path / "b.png", size=(4, 6))
    with pytest.raises(InputError, match=r"begins with .*a\.png: .*got sizes 4×6, 4×8.*Use --batch-size 1"):
        next(read_images(tmp_path, processor))
    assert len(list(read_images(tmp_path, processor, batch_size=1))) == 2


def test_error_of_a_processor_that_has_nothing_to_do_with_sizes_is_its_own(nine: Path) -> None:
    def processor(images, return_tensors):
        raise ValueError("out of order")

    with pytest.raises(ValueError, match=r"^out of order$"):
        next(read_images(nine, processor))


def test_without_pillow(nine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(
        InputError, match=r"got no Pillow installed\. Install it: pip install 'rankwise\[images\]'"
    ):
        read_images(nine, KEEP)


@pytest.mark.parametrize("name", ["sequences", "batch_size"])
def test_numbers_below_one(name: str, nine: Path) -> None:
    with pytest.raises(InputError, match=f"`{name}`: expected a whole number"):
        read_images(nine, KEEP, **{name: 0})


def test_a_model_reads_what_comes_out(nine: Path) -> None:
    config = ViTConfig(
        image_size=4,
        patch_size=2,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    from transformers import ViTModel

    [batch] = read_images(nine, ViTImageProcessorPil(size={"height": 4, "width": 4}), sequences=2)
    assert ViTModel(config)(**batch).last_hidden_state.shape == (2, 5, 8)
