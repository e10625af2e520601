"""Checkpoints: written whole or not at all, read at any world size, stage and precision. See docs/checkpoints.md."""
