"""DeepSpeed as the variables that tell accelerate, in every process of a run, to use it."""

import os
import sys
from pathlib import Path
from typing import Any

from dml.config import CONFIGS, find_config, read_yaml

STAGES = ("zero1", "zero2", "zero3")
# Where the processes are is the launcher's business, and says nothing of the training.
PLACES = {
    *("compute_environment", "debug", "num_machines", "num_processes", "machine_rank", "gpu_ids"),
    *("main_process_ip", "main_process_port", "main_training_function", "rdzv_backend"),
    *("same_network", "use_cpu", "enable_cpu_affinity"),
    *("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "downcast_bf16"),
}
KINDS = ("NO", "MULTI_GPU", "DEEPSPEED")


def deepspeed_variables(stage: str) -> dict[str, str]:
    """What `accelerate launch --config_file configs/accelerate/STAGE.yaml` would set."""
    return _variables(CONFIGS / "accelerate" / f"{stage}.json", init=False)


class AccelerateError(ValueError):
    """What is wrong with a config file of accelerate, and what to do about it."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(f"{rule}; {fix}")
        self.rule, self.fix = rule, fix


def accelerate_variables(path: str) -> dict[str, str]:
    """What `accelerate launch --config_file PATH` would set, apart from the places of the processes."""
    given = _read(find_config(Path(path)))
    kind, section = given.get("distributed_type"), given.get("deepspeed_config") or {}
    if kind not in KINDS:
        raise AccelerateError(f"has distributed_type {kind}", f"choose one of {', '.join(KINDS)}")
    if given.get("mixed_precision", "no") != "no":
        raise AccelerateError("has a mixed_precision", "set engine.precision in the config instead")
    known = {*PLACES, "distributed_type", "deepspeed_config", "mixed_precision"}
    if others := sorted(set(map(str, given)) - known):
        raise AccelerateError(f"has {', '.join(others)}, which a run does not use", "remove it")
    if kind != "DEEPSPEED":
        return {}
    settings = section.get("deepspeed_config_file")
    found = find_config(Path(str(settings)))
    if settings is None or not os.path.isfile(found):
        rule = f"names the deepspeed_config_file {settings}, which is not there"
        raise AccelerateError(rule, "name a file by its path from the working folder")
    return _variables(found, init=bool(section.get("zero3_init_flag")))


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = read_yaml(file)
    except OSError as error:
        raise AccelerateError(f"{file.absolute()}: {error.strerror}", "check the path") from None
    except ValueError as error:
        raise AccelerateError(f"is not YAML ({error})", "check the file") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("deepspeed_config") or {}, dict):
        raise AccelerateError("is no config of accelerate", "write it with `accelerate config`")
    return tree


def _variables(settings: Path, init: bool) -> dict[str, str]:
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(settings.absolute()),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(init).lower(),
    }


def search_path() -> str:
    """PATH with the folder of this Python: DeepSpeed calls ninja, which may be there only."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
