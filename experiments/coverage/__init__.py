"""Experiments on how much of each architecture capture and λ-skips cover."""
