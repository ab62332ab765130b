"""What `gpurun init` writes: a job that runs anywhere, with the other keys as comments."""

from gpurun.launcher.strategies import IN_JOBS


def job_template() -> str:
    """Text of a commented job file."""
    return _TEMPLATE.replace("STRATEGIES", " | ".join(IN_JOBS))


_TEMPLATE = """\
# A job for gpurun. `gpurun check FILE` prints its plan, `gpurun FILE` runs it.
# All keys: docs/job-file.md, or `gpurun schema` for your editor.

workload: gpt              # `gpurun workloads` lists more; your own: train.py:build or package.module:build
params: {}                 # arguments of the workload's function, by name
devices: auto              # all GPUs, or two CPU devices; cpu:4 | cuda | [cuda:0, cuda:1]
global_batch: 64           # samples per optimizer step, over all devices
precision: fp32            # fp64 | fp32 | tf32 | bf16 | fp16

compare:                   # every combination of these is measured
  strategy: [ddp]          # STRATEGIES
  split:                   # samples per device
    - even                 # as torch.chunk cuts the batch
    # - [48, 16]           # one number per device; must add up to global_batch
    # - "3:1"              # in this ratio
    # - balanced           # the best split for these devices, found by measuring
  # device_count: [1, 2]   # the first ones of `devices`
  # params: [{}, {}]       # merged into the params above

# baseline: {split: even}  # what the others are compared with; by default the first variant

steps:
  warmup: 10               # at least this many steps before timing begins
  rounds: 28               # at most; a round runs every variant for 200 ms, on GPUs for 1 s
  early_stop: true         # stop as soon as every comparison is decided
profile: {steps: 3}        # a trace per variant and rank, after the timed steps; 0 takes none
timeout: 10m               # per variant
# hang_timeout: 2m         # no step for this long: report which rank the others wait for, then stop
# restarts: 2              # after transient failures: signals, lost connections, hangs
"""
