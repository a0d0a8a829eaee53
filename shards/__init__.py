"""Datasets as webdataset shards with random access. Knows nothing of dml."""
