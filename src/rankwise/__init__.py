"""Measure, keep and spend the rank of sequence models."""

__version__ = "0.1.0.dev0"
