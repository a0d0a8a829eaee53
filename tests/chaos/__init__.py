"""Random faults against real runs: `python -m tests.chaos` (docs/reliability.md).

- `campaign` (draw, carry_out, table): which trials, one after another, and their table
- `trials` (KINDS): what is done in a trial of each kind
- `faults` (Moment, damage): what can be done to a run, and when
- `hostile` (configs, shards, weights, images): inputs made to do harm
- `setups` (Setup): the ways in which the same run is started
- `lab` (Lab, Trial): what trials share, and what each has of its own
- `running` (Watched): starts programs and watches all of their processes
- `judge` (Violation, Outcome): identical, refused, or a violation
- `shim` (compile_shim): inject.c, a disk that fails and a clock that jumps
- `soak` (main): a long run whose memory, descriptors, threads and disk must stay flat
"""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[1])
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)  # the helpers of the tests, as in pytest
