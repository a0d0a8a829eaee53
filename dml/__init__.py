"""Distributed training for deep metric learning with very large batches."""
