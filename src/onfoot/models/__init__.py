"""Networks built from forward/backward pairs, and the `Model` object for users."""
