"""AdamW updates in place, and the global norm for gradient clipping."""
