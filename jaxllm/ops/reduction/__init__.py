"""Reductions of whole arrays: the sum, the largest element, the dot product, a histogram."""
