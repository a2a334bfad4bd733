"""Blocks of a transformer: ops composed of ops, fused where a kernel exists."""
