"""Print docs/config.md: every key of a config, with its type, default, rule and meaning."""

import argparse

from dml.config.reference import reference

if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m dml.config", description=__doc__).parse_args()
    print(reference(), end="")
