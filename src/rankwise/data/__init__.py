"""Texts, pictures and data sets into batches that a model reads.

Nothing of transformers, datasets or Pillow is imported before it is needed.
"""

from rankwise.data.batches import text_batches
from rankwise.data.dataset import DatasetSpec, dataset_texts, parse_dataset
from rankwise.data.evenly import Shard
from rankwise.data.hub import hub_reachable
from rankwise.data.images import find_images, read_images
from rankwise.data.model_inputs import check_texts, longest_sequence, model_batches, takes_mask
from rankwise.data.processors import PlainImageProcessor, load_image_processor
from rankwise.data.text import load_text, read_rows, read_text

__all__ = [
    "DatasetSpec",
    "PlainImageProcessor",
    "Shard",
    "check_texts",
    "dataset_texts",
    "find_images",
    "hub_reachable",
    "load_image_processor",
    "load_text",
    "longest_sequence",
    "model_batches",
    "parse_dataset",
    "read_images",
    "read_rows",
    "read_text",
    "takes_mask",
    "text_batches",
]
