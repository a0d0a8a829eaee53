"""What a run is asked to do: sections in YAML files, read, completed and checked.

- `sections`: the frozen dataclasses, their defaults and rules
- `keys` (key): what a key says of itself
- `loading`: files, `extends` and --set into a Config
- `mixing` (Part, Mixed, share_classes, dataset_names): what each of several datasets brings to a run
- `remembering` (Memory): the section of the cross-batch memory
- `towers` (Towers): the section of two towers
- `packaged` (find_config, find_shards): the files that are installed with the package
- `yaml12`: the YAML that is read and written
- `synonyms`: what a user may have meant by an unknown key
- `reference`: docs/config.md, which `python -m dml.config` prints
"""

from dml.config.loading import add_arguments, add_set, flatten, load, to_dict, to_yaml
from dml.config.packaged import CONFIGS, find_config
from dml.config.sections import (
    EXECUTION,
    LATER,
    SECTIONS,
    Batch,
    Config,
    Data,
    Engine,
    Eval,
    Length,
    Loss,
    Model,
    Optim,
    Run,
    Save,
)
from dml.config.yaml12 import parse, read_yaml
from dml.errors import ConfigError

__all__ = [
    "CONFIGS",
    "EXECUTION",
    "LATER",
    "SECTIONS",
    "Batch",
    "Config",
    "ConfigError",
    "Data",
    "Engine",
    "Eval",
    "Length",
    "Loss",
    "Model",
    "Optim",
    "Run",
    "Save",
    "add_arguments",
    "add_set",
    "find_config",
    "flatten",
    "load",
    "parse",
    "read_yaml",
    "to_dict",
    "to_yaml",
]
