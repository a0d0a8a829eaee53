"""One command for the owner of a GPU: what the tests prove on a CPU, proven and measured there.

- `main` (main, examine): the program
- `verdict` (Line, page, as_json): a line per check, with its verdict, as a page and as JSON
- `place` (Place, Sizes): where a check runs: a device and a group of processes; how large it is
- `machine` (machine_lines): versions and topology
- `exact` (loss_lines, recall_lines, group_lines): losses, retrieval and training against float64 on the CPU
- `stages` (zero_lines): ZeRO 1 to 3 against DDP
- `waits` (wait_lines): where the host waits for the device in a step
- `speed` (loss_speed, training_speed, gather_speed): seconds against the bare limit
- `kill` (kill_lines): a rank that is killed in a training
- `group` (run_checks): starts the processes of checks, and collects their lines
- `rank` (main, CHECKS): one of these processes
"""
