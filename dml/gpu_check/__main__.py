"""python -m dml.gpu_check"""

from dml.gpu_check.main import main
from shards.output import exit_code

if __name__ == "__main__":
    raise SystemExit(exit_code(main))
