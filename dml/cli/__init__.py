"""The command `dml`, thin over the programs.

- `main` (main, COMMANDS): chooses the program, and lists them all
- `train` (main): `dml train`: checks what was asked for, then trains in this process or in several
- `demo` (main): `dml demo`: trains on the bundled icons
- `ranks` (launch, conclude): starts the processes of a training, passes signals on, says how they ended
- `rank` (main): one of these processes
- `doctor` (main): `dml doctor`: what this machine has, and what is missing
- `network` (serve, measure): round trip and bandwidth between two nodes
"""
