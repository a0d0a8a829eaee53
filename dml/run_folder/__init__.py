"""What a run leaves behind, and how it is found again.

- `files` (write_json, read_json, read_lines, Lines): files that are whole or not there; no torch
- `folder` (folder_of, open_folder, settings_digest, differences, is_of_length): whose folder it is; no torch
- `progress` (Progress): where a run stands
- `checkpoint` (Checkpoint, write, read, read_last): checkpoints, whole or not there
- `background` (Background): one job at a time in a thread, beside the training
- `saver` (Saver, last_checkpoint, restore): saves a run, and restores it
- `clock` (Clock): where the seconds of a step go
- `events` (Training, Pairs, Evaluation, End): what a run has to tell its loggers
- `journal` (Journal, Logger, JsonLines): who is told: metrics.jsonl, timing.jsonl, TensorBoard
- `tensorboard_log` (TensorBoard): TensorBoard's event files
- `trackers` (Trackers): wandb, mlflow and others, through accelerate
- `reporter` (Reporter): what is reported every run.log_steps, with the progress bar
- `result` (result_of, write_result, summary): the trained model, a picture, the scores
"""
