"""pybuild: CUDA extensions for PyTorch, built within the memory of the machine."""

__version__ = "0.1.0"
