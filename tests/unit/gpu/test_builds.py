"""Which build of torch serves which GPUs, by torch's own tables."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.cuda import DEVICE_REQUIREMENT, PYTORCH_RELEASES_CODE_CC

from gpurun.launcher.machine.accelerators import (
    CAPABILITIES,
    DEFAULT,
    TorchBuild,
    build_for,
    nvidia_problem,
    runs_on,
)
from gpurun.launcher.machine.gpus.gpu import Gpu, Gpus
from tests.known import known
from tests.wording import Wording

# 23: a build of torch lacks the kernels of some GPUs


def test_the_table_of_builds_is_torchs_own() -> None:
    assert dict(CAPABILITIES) == PYTORCH_RELEASES_CODE_CC


@given(st.sampled_from(sorted(set().union(*CAPABILITIES["12.6"].values(), *CAPABILITIES["13.0"].values()))))
def test_kernels_run_on_the_gpus_that_torch_says(code: int) -> None:
    for major in range(4, 15):
        for minor in range(10):
            expected = 10 * major + minor in DEVICE_REQUIREMENT[code]
            assert runs_on(code, (major, minor)) == expected, (code, major, minor)


def build(cuda: str) -> TorchBuild:
    return TorchBuild(f"2.13.0+cu{cuda.replace('.', '')}", {"cuda": cuda})


def problem(cuda: str, newest: str | None, *capabilities: tuple[int, int] | None) -> str | None:
    """Of the first GPU of a machine that has GPUs of these capabilities."""
    gpus = tuple(
        cast(Gpu, SimpleNamespace(capability=capability, name=f"GPU {i}"))
        for i, capability in enumerate(capabilities)
    )
    made = TorchBuild("2.13.0+cpu", {}) if cuda == "cpu" else build(cuda)
    return nvidia_problem(made, Gpus(gpus, "570.86.10", newest), gpus[0], "cuda", "x86_64")


V100, A100, H200, B200 = (7, 0), (8, 0), (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("cuda", "newest", "capabilities", "index"),
    [
        ("13.0", "13.0", (V100,), "cu126"),  # by torch/cuda/__init__.py:326, `PYTORCH_RELEASES_CODE_CC`
        ("13.0", "12.8", (B200,), "cu129"),  # cu126 has no sm_100
        ("12.6", "13.2", (B200,), "cu130"),
        ("13.0", "12.8", (H200,), "cu126"),
        ("13.0", "12.8", (A100, B200), "cu129"),
        ("cpu", "13.0", (V100,), "cu126"),
        ("cpu", "13.0", (A100,), "cu130"),
        ("cpu", "13.0", (A100, V100), "cu126"),  # one build for both
        ("cpu", None, (None,), "cu130"),
    ],
)
def test_the_hint_names_a_build_for_driver_and_gpu(
    cuda: str, newest: str | None, capabilities: Sequence[Any], index: str
) -> None:
    found = known(problem(cuda, newest, *capabilities))
    assert found.endswith(f"--index-url https://download.pytorch.org/whl/{index}")


def test_a_gpu_that_torch_has_no_kernels_for_is_refused_before_the_first_one_fails(wording: Wording) -> None:
    found = known(problem("13.0", "13.0", V100))
    wording(found)
    assert problem("12.6", "13.0", V100) is None
    assert problem("13.0", "13.0", A100, V100) is None  # the other GPU is refused, not this one
    kepler = known(problem("12.6", "12.6", (3, 7)))
    wording(kepler)
    old = known(problem("13.0", "11.4", A100))
    assert old.endswith("\n    update the driver")
    blackwell = known(problem("cpu", "11.4", B200))
    assert blackwell.endswith("\n    update the driver")


def test_what_is_not_in_the_table_is_left_to_torch() -> None:
    """A build from source, a container's own, a GPU newer than torch, a driver that gives no capability."""
    gpus = Gpus((cast(Gpu, SimpleNamespace(capability=V100)),), "580", "13.0")
    own = TorchBuild("2.13.0a0+gitcf30153", {"cuda": "13.0"})
    assert nvidia_problem(own, gpus, gpus.gpus[0], "cuda", "x86_64") is None
    assert problem("13.0", "13.0", (14, 0)) is None
    assert problem("13.0", "13.0", None) is None
    assert problem("12.8", "13.0", V100) is None


def test_setting_up_takes_the_build_that_the_hint_names() -> None:
    def gpus(newest: str | None, *capabilities: tuple[int, int]) -> Gpus:
        found = tuple(cast(Gpu, SimpleNamespace(capability=each)) for each in capabilities)
        return Gpus(found, "570.86.10", newest)

    assert build_for(gpus("13.0", H200), "x86_64") == DEFAULT
    assert build_for(gpus("13.0", A100, V100), "x86_64") == "cu126"
    assert build_for(gpus("12.8", B200), "x86_64") == "cu129"
    assert build_for(gpus("11.4", A100), "x86_64") is None
    assert build_for(gpus("13.0"), "x86_64") is None
    assert f"cu{next(iter(CAPABILITIES)).replace('.', '')}" == DEFAULT
