"""Helpers of all packages."""
