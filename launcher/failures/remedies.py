"""The advice about usual failures of ranks, chosen by what they wrote."""

import re
import sys
from collections.abc import Mapping

GLOO_MISMATCH = "Is there a distributed collective mismatch in your code"
"""The message of gloo before it aborts. Source: gloo/transport/tcp/pair.cc."""
NO_CUDA = (
    r"\w+: (Torch not compiled with CUDA|module 'torch._C' has no attribute '_cuda_"
    r"|Found no NVIDIA driver|No CUDA GPUs are)"
)
"""Torch's answers where a program asks for a GPU in vain."""
REFUSED_ARGUMENTS = r"SystemExit: exit code 2\n(?s:.*)^(?P<said>[Uu]sage: (?s:.*))"
"""How argparse and click end a program; what they said begins with its usage."""
RELATIVE_IMPORT = "ImportError: attempted relative import with no known parent package"
STEPS_DIFFER = (
    "all ranks must make the same steps: give each as many batches (`DistributedSampler`, `drop_last=True`), "
    "and let none `return`, `break` or exit alone"
)
"""The advice about a rank that ended well while others waited for it."""
USUAL = {
    r"ModuleNotFoundError: No module named": (
        f"the ranks' Python is {sys.executable}: install the module there, or start gpurun with PYTHONPATH=…"
    ),
    NO_CUDA: (
        "the program asks for a GPU, and torch finds none: `gpurun devices` says why; on CPU devices it must "
        'take the device "cpu" and the backend "gloo"'
    ),
    r"\w+: (Distributed package doesn't have NCCL|ProcessGroupNCCL is only supported with GPUs)": (
        'NCCL needs NVIDIA GPUs; CPU devices need the backend "gloo", and '
        "`init_process_group()` without a backend takes the one that fits"
    ),
    f"(?s:.*){GLOO_MISMATCH}": (
        "ranks called different collectives, or one with different sizes; to see which, let torch compare "
        "them before each call: start gpurun with TORCH_DISTRIBUTED_DEBUG=DETAIL"
    ),
    RELATIVE_IMPORT: (
        "a file that belongs to a package is run as its module: `gpurun run -m package.train`, from the "
        "directory that contains the package; in a job `module: package.train`"
    ),
    r"EOFError: EOF when reading a line": (
        "the ranks' input is empty: pass what `input()` asks for as an argument, after `--`; in a job "
        "arguments are `args` of a program, `params` of a workload"
    ),
    r"SystemExit: exit code 2\n(?s:.*)^usage: (?s:.*)error: .*(required|unrecognized).*--local[-_]rank": (
        'the ranks get no `--local-rank`, as under torchrun: read `int(os.environ["LOCAL_RANK"])` instead'
    ),
    REFUSED_ARGUMENTS: (
        "the program refused its arguments; they follow `--`: `gpurun run train.py -- --epochs 1`; "
        "in a job they are `args`"
    ),
}
"""Remedies by type, message and log of an error; the first that fits is given."""
OF_WORKLOADS = {
    RELATIVE_IMPORT: (
        "a file that belongs to a package is named as its module: `workload: package.train:build`, with the "
        "job file next to the package"
    ),
    r"RuntimeError: expected (target dtype to be Long or Byte, but got|scalar type Long but found)": (
        "targets that are classes must be whole numbers: `targets.long()`, in `batch` or in `loss`"
    ),
    NO_CUDA: (
        "leave the model on the CPU and unwrapped: gpurun moves it to its device and wraps it "
        "(docs/your-model.md)"
    ),
}
"""The advice where a workload does what gpurun would."""


def usual_remedy(found: str, usual: Mapping[str, str]) -> str | None:
    """The advice about a failure, if it is one of the usual ones."""
    fitting = (text for pattern, text in usual.items() if re.match(pattern, found, re.MULTILINE))
    return next(fitting, None)
