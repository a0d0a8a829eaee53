"""Random faults against real runs: `python -m tests.chaos` (docs/reliability.md).

- `campaign` (draw, carry_out, table): which trials, what comes of them, and the table
- `kinds` (Kind, KINDS): the kinds of trials
- `on_processes`, `on_disks`, `on_files`, `on_inputs`, `on_slurm`: what is done in a trial of each kind
- `undergo` (undergo, finish): a run is disturbed, judged, and resumed
- `faults` (Moment, damage): what can be done to a run, and when
- `hostile` (config, shards, weights, images, embeddings): inputs made to do harm
- `setups` (Setup): the ways in which the same run is started
- `lab` (Lab, Trial): what trials share, and what each has of its own
- `running` (Watched): starts programs and watches all of their processes
- `judge` (Violation, Outcome): identical, refused, or a violation
- `shim` (compile_shim): inject.c, a disk that fails and a clock that jumps
- `soak` (main): a long run whose memory, descriptors, threads and disk must stay flat
"""

import os
import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1])
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)  # the helpers of the tests, as in pytest
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in conftest.py: threads must not spin
os.environ.setdefault("OMP_NUM_THREADS", "1")  # numpy starts its threads when it is imported
