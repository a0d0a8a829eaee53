"""Who takes part in a run: its processes, and what they say to each other.

- `team` (Team): fail, save and leave together; the object that the story uses
- `processes` (make_accelerator, settle_buckets): the one place that makes the Accelerator
- `signals` (Interrupt, Interrupted): signals that ask a run to save and leave
- `collectives` (Wire): few, fused all-gathers, a reduce-scatter, and their bytes
- `full_state` (read_weights, write_weights, send_weights,
  read_slots, write_slots): whole tensors under any ZeRO stage
- `learned_state` (Learning, read_learned, write_learned): what the loss learns, of all classes
- `precision` (full_precision, at_least_float32): similarities in full float32
- `workers` (loader_workers, local_processes, ranks_of_machine): how many processes a machine has
- `malloc` (keep_freed_memory): the memory that the C library hands out
"""
