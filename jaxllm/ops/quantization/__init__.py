"""Int8 weights with one scale per group: quantization, and matmuls with such weights."""
