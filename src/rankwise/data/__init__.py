"""Read texts, pictures and data sets.

Nothing of transformers, datasets or Pillow is imported before it is needed.
"""

from rankwise.data.dataset import DatasetSpec, dataset_texts, parse_dataset
from rankwise.data.hub import hub_reachable
from rankwise.data.images import find_images, read_images
from rankwise.data.processors import PlainImageProcessor, load_image_processor
from rankwise.data.text import load_text, read_rows, read_text

__all__ = [
    "DatasetSpec",
    "PlainImageProcessor",
    "dataset_texts",
    "find_images",
    "hub_reachable",
    "load_image_processor",
    "load_text",
    "parse_dataset",
    "read_images",
    "read_rows",
    "read_text",
]
