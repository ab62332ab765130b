"""Every query of NVML that gpurun makes, with its answer; reads only."""

import re
from pathlib import Path

from gpurun.launcher.machine.gpus import nvml
from gpurun.launcher.machine.gpus.nvml import ask, load_nvml

OF_A_GPU = re.compile(r'"(nvmlDeviceGet\w+)", (?:self\.)?(?:handle|gpu)\)')


def main() -> None:
    """Prints the answers, and which queries have none."""
    binding = load_nvml()
    if binding is None:
        print("FOUND: pynvml isn't installed")
        return
    try:
        binding.nvmlInit()
    except binding.NVMLError as error:
        print(f"FOUND: no NVML: {error}")
        return
    queries = sorted(set(OF_A_GPU.findall(Path(nvml.__file__).read_text())))
    for index in range(binding.nvmlDeviceGetCount()):
        handle, unknown = binding.nvmlDeviceGetHandleByIndex(index), []
        for query in queries:
            answer = ask(binding, query, handle)
            print(f"{index} {query}: {answer}")
            unknown += [query] if answer is None else []
        print(f"FOUND: GPU {index}: no answer to {', '.join(unknown) or 'none of them'}")


if __name__ == "__main__":
    main()
