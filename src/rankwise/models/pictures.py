"""How pictures are prepared for an image classifier."""

from typing import Any

from rankwise.models.configuration import ToSTConfig

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BICUBIC = 3
"""Pillow's number for it."""
MARGIN = 256 / 224
"""The shorter side before the crop, over the side of the crop."""


def picture_settings(config: ToSTConfig) -> dict[str, Any]:
    """What ``preprocessor_config.json`` holds: resize, crop from the middle, ImageNet's mean and deviation.

    A released checkpoint does not say how its pictures were prepared; this is how the training code that the
    release is based on (DeiT's) evaluates.

    Args:
        config: of the model, for the size.

    Examples:
        >>> settings = picture_settings(ToSTConfig(image_size=224))
        >>> settings["size"], settings["crop_size"]
        ({'shortest_edge': 256}, {'height': 224, 'width': 224})
    """
    side = config.image_size
    return {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": round(MARGIN * side)},
        "resample": BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(IMAGENET_MEAN),
        "image_std": list(IMAGENET_STD),
        "do_convert_rgb": True,
    }
