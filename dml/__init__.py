"""Distributed training for deep metric learning with very large batches."""

__version__ = "0.1.0.dev0"
