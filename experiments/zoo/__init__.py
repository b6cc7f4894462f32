"""Tiny random models of every architecture, built in memory, for experiments and tests."""
