"""λ-skips: bounds that experiments retry."""
