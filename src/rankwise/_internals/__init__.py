"""Private helpers that all packages share."""
