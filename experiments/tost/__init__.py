"""Experiments with TSSA, the attention of ToST."""
