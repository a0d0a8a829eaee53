"""python -m dml.cli, for where the command `dml` is not installed."""

from dml.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
