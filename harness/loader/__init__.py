"""Which packs a rank trains on and when, and the worker processes that read them."""
