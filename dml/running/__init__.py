"""What a run consists of on this process; `dml/training.py` tells what becomes of it.

- `build` (Run): its parts, built from the config and taken up where the run ended
- `coming` (Coming, Prepared): the batch of the next step, prepared while this one is computed
"""
