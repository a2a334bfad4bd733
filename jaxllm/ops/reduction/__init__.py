"""Reductions of whole arrays: sum, maximum, dot product, histogram."""
