"""The optimizer's step: AdamW in place, and the norm that gradients are clipped to."""
