"""Audits: capture, measures and theory over batches, streaming."""
