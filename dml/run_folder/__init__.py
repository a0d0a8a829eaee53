"""What a run leaves behind, and how it is found again.

- `files` (write_json, read_json, read_lines, Lines): files that are whole or not there; no torch
- `folder` (open_folder, hold, differences, is_finished): which config a folder belongs to; no torch
- `checkpoint` (write, read, read_last, Checkpoint): checkpoints, whole or not there
- `saver` (Progress, Keeper, last_checkpoint): where a run stands, saved and found again
- `journal` (Journal): metrics.jsonl, timing.jsonl and TensorBoard
- `clock` (Clock): where the seconds of a step go
- `result` (write_result): the trained model, a picture, the scores
"""
