"""Print docs/config.md: every key of a config, with its type, default, rule and meaning."""

import argparse

from dml.config.reference import reference
from shards.output import exit_code


def main() -> int:
    argparse.ArgumentParser(prog="python -m dml.config", description=__doc__).parse_args()
    print(reference(), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
