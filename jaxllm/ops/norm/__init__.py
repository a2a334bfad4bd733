"""Layer and RMS normalization, alone and fused with the residual addition before them."""
