"""Kernels of our own for what the libraries do slowly, written in Triton. Imported only where they are used."""
