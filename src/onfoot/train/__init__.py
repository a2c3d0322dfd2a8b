"""Training: data, the optimizer, the schedule, checkpoints, and the loop that joins them."""
