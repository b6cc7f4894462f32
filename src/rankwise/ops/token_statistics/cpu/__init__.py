"""TSSA on a CPU: loops over pieces of the tokens, compiled by numba, which keep no tensor of w's size."""
