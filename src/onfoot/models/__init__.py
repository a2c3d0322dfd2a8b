"""Networks built from the pairs, and the object users hold."""
