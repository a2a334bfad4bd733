"""Weights as int8 with a scale for each group: rounding them, and products with them."""
