"""What to do with a trained model: embed images, keep the embeddings, show neighbours.

- `trained` (load_trained, load_backbone, embed, model_sha256, weights_sha256): the model of a finished run, and images through it
- `embedded` (Embedded, Info, read, write): a folder of embeddings, whole or not there
- `neighbours` (nearest): the exact search
- `index_file` (write_index, read_index): an approximate search for large sets, by faiss
- `make_index` (main): the command `dml index`
- `picture` (Found, retrieval_picture, stacked): queries and their nearest neighbours, drawn
- `whole_folder` (refuse_occupied, replace_folder): a folder that is whole or not there
"""
