"""Generation: the KV cache, sampling, and the loop that appends one token after another."""
