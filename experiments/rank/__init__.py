"""Experiments on ranks of operators."""
