"""Many runs: sweeps, their jobs on a cluster or on one machine, and the report of their results.

- `slurm` (main): the program that plans, submits, shows and cancels the runs of a sweep
- `report` (main): the program that writes our results beside the paper's
- `sweep` (read_sweep, plan_all, choose, Sweep, SweepRun, SweepError): a study as a list of runs
- `resources` (Resources, RESOURCE_HELP): what a run asks of Slurm, in a sweep and as flags
- `zero` (deepspeed_variables, accelerate_variables): DeepSpeed as variables of the processes
- `estimate` (estimate, Estimate): the hours of a run and the paper's score, before it is started
- `slurm_commands` (slurm, is_installed, SlurmError): Slurm's commands, called in one place
- `submission` (submit, queued_jobs, cancel, batch_script): the jobs of a sweep in Slurm's queue
- `job` (Job, job_of, finish): one run as a Slurm job
- `local` (run_here): one run on this machine
- `processes` (start_rank, wait, end, process_environment): the processes of a run on this machine
- `run_files` (read_result, read_failed, read_metrics): the small files of a run, checked
- `outcome` (record_outcome): how a run ended, and whether it is started again
- `status` (RunStatus, status_of): the state of a run, from its folder and Slurm's queue
- `records` (read_studies, Study, Group, Run): what runs left behind, grouped by settings
- `paper` (read_tables, tables_for, paper_score): the paper's tables, found by a run's settings
- `compared` (comparisons): our results among those of other systems
- `tables` (markdown, as_csv): the report as Markdown and CSV
- `page` (page): the report as one HTML page
- `plots` (chart): line charts as SVG
"""
