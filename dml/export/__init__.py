"""A trained model for programs that do not have dml: ONNX, torch.export, a folder for Hugging Face.

- `program` (main): the command `dml export`
- `preprocessing` (description, source): how a photo becomes what the model takes, in words and as code
- `graph` (exported, as_onnx, as_torch, as_python): the model as a graph
- `card` (model_card): data, recipe and scores in the form of a model card
"""
