"""Replays: kept checkpoints, snapshots, temporary files, every engine and dropout give the same scores."""
