"""TSSA on a CPU: loops compiled by numba, which read w two to four times and keep no tensor of its size."""
