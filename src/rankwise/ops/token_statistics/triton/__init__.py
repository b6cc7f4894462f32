"""TSSA on a GPU: Triton kernels over chunks of tokens, one head each, with a short scan between them."""
