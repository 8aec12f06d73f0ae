"""A sanitizer for Numba CUDA kernels and the memory that they work on. It knows nothing of models."""
