"""One module a dataset; each reads the layout in which the dataset is published."""
