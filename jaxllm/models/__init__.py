"""Models as plain functions: a config, parameters in nested dicts, and a forward pass."""
