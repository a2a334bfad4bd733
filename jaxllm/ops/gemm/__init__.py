"""Linear layers and matrix multiplication."""
