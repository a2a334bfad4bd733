"""What decoding does in one piece because each kernel by itself would be too short."""
