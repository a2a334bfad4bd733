"""How a call finds its kernel: backends, dispatch, derivatives, and the extension's FFI calls."""
