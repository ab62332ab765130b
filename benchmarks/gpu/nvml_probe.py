"""Every query of NVML that gpurun makes, with its answer; reads only."""

import os
from collections.abc import Callable
from typing import Any

from gpurun.launcher.machine.gpus.nvml import inspect_health, inspect_nvidia_gpus, inspect_sensors, load_nvml


class Recorded:
    """The binding, which prints each query and its answer."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding
        self.unknown: dict[str, str] = {}
        """Why a query had no answer, by its name."""

    def __getattr__(self, name: str) -> Any:
        """The function of that name, which prints."""
        found = getattr(self.binding, name)
        return self._printing(name, found) if name.startswith("nvml") and callable(found) else found

    def _printing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def query(*arguments: Any) -> Any:
            shown = ", ".join(str(each) for each in arguments if isinstance(each, int | str))
            try:
                answer = function(*arguments)
            except Exception as error:
                self.unknown[name] = str(error)
                print(f"{name}({shown}): {error}")
                raise
            print(f"{name}({shown}): {answer}")
            return answer

        return query


def main() -> None:
    """Prints the answers, and which queries have none."""
    found = load_nvml()
    if found is None:
        print("FOUND: pynvml isn't installed")
        return
    binding: Any = Recorded(found)
    gpus = inspect_nvidia_gpus(os.environ, binding=binding).gpus
    indices = [gpu.index for gpu in gpus]
    for sensors in inspect_sensors(indices, os.environ, binding):
        print(sensors.hot_ns(), sensors.throttling(), sensors.mean_clock_mhz(0))
        print(sensors.pcie_link(), sensors.energy_mj(), sensors.power_w())
    print(inspect_health(indices, os.environ, binding))
    unknown = ", ".join(f"{name} ({why})" for name, why in sorted(binding.unknown.items()))
    print(f"FOUND: {len(gpus)} GPUs; no answer to {unknown or 'no query'}")


if __name__ == "__main__":
    main()
