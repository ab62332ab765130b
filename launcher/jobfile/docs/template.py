"""What `gpurun init` writes: a job that runs anywhere, with the other keys as comments."""

from gpurun.launcher.strategies import IN_JOBS

SCHEMA_FILE = "gpurun.schema.json"
"""What the first line names: a file next to the job file."""


def job_template() -> str:
    """Text of a commented job file."""
    return _TEMPLATE.replace("STRATEGIES", " | ".join(IN_JOBS)).replace("SCHEMA", SCHEMA_FILE)


_TEMPLATE = """\
# yaml-language-server: $schema=SCHEMA
# A job for gpurun. `gpurun check FILE` prints its plan, `gpurun FILE` runs it.
# An editor with support for YAML completes and explains all keys, by the schema in the first line.

workload: gpt              # `gpurun workloads` lists more; your own: train.py:build or package.module:build
params: {layers: 2, width: 128}  # arguments of the workload's function, by name; {} is GPT-2 small
devices: auto              # all GPUs, or two CPU devices; cpu:4 | cuda | [cuda:0, cuda:1]
global_batch: 64           # samples per optimizer step, over all devices
precision: fp32            # fp64 | fp32 | tf32 | bf16 | fp16

compare:                   # every combination of these is measured
  strategy: [ddp, dp]      # STRATEGIES
  split:                   # samples per device
    - even                 # as torch.chunk cuts the batch
    # - [48, 16]           # one number per device; must add up to global_batch
    # - "3:1"              # in this ratio
    # - balanced           # the best split for these devices, found by measuring
  # device_count: [1, 2]   # the first ones of `devices`
  # params: [{}, {}]       # merged into the params above

# baseline: {split: even}  # what the others are compared with; by default the first variant

until: decided             # launches are repeated until the fastest variant is known …
budget: 3m                 # … at most for this long
# steps: {rounds: 28, launches: 6}  # or a fixed size; in each round variants run for 200 ms, on GPUs 1 s
profile: {steps: 3}        # a trace per variant and rank, after the timed steps; 0 takes none
timeout: 10m               # per variant
# hang_timeout: 2m         # no step for this long: report which rank the others wait for, then stop
# restarts: 2              # after transient failures: signals, lost connections, hangs
"""
