"""Text generation: the KV cache, sampling and the autoregressive loop."""
