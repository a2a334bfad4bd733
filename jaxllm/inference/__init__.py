"""Text generation: sampling, int8 weights, and decoding with a key-value cache."""
