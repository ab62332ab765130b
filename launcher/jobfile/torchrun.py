"""The command line of torchrun, and what each of its options means here. Pure.

Every option is the same here, is translated to what gpurun has for it, or is refused with the reason. Source:
torch/distributed/run.py, `get_args_parser`; each but `NO_VARIABLE` has a variable, too: PET_ and its name.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from gpurun.launcher.errors import SpecError
from gpurun.launcher.jobfile.values import BECOMES_COMMAND
from gpurun.launcher.rundir.rank_files import RankFiles

SAME = ("standalone", "monitor_interval", "start_method")
"""Options that need nothing: a rank's end is noticed at once, and programs are started, not functions."""
TRANSLATED = (
    *("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "local_addr"),
    *("rdzv_endpoint", "rdzv_id", "rdzv_backend", "rdzv_conf"),
    *("max_restarts", "shutdown_timeout", "signals_to_handle", "numa_binding", "role"),
    *("log_dir", "redirects", "tee", "local_ranks_filter"),
    *("module", "run_path", "no_python", "training_script", "training_script_args"),
)
"""Options with another name here, or with other values, as `_line` says."""
REFUSED = {
    "event_log_handler": "events are in the run directory, as events.jsonl",
    "logs_specs": "logs are in the run directory, and `logs` in a job says how much is kept",
    "duplicate_stdout_filters": "`gpurun logs RUN` prints all lines, for grep",
    "duplicate_stderr_filters": "`gpurun logs RUN` prints all lines, for grep",
    "virtual_local_rank": "each rank has its own LOCAL_RANK and sees all GPUs",
}
"""Options that are refused unless they have their default, and what to do instead."""
NO_VARIABLE = frozenset({"logs_specs", "numa_binding"})
"""Options that no variable stands in for."""
DEFAULTS = {
    "nnodes": "1:1",
    "nproc_per_node": "1",
    "rdzv_backend": "static",
    "rdzv_id": "none",
    "redirects": "0",
    "tee": "0",
    "event_log_handler": "null",
    "role": "default",
    "logs_specs": "default",
    "max_restarts": "0",
    "signals_to_handle": "",
}
VARIABLES = {
    "rdzv_id": "TORCHELASTIC_RUN_ID",
    "role": "ROLE_NAME",
    "signals_to_handle": "TORCHELASTIC_SIGNALS_TO_HANDLE",
}
"""Variables of ranks, by the option whose value they get."""
_CHOICES = {"start_method": ("spawn", "fork", "forkserver")}
_FLAGS = frozenset({"standalone", "module", "no_python", "run_path", "virtual_local_rank"})
_SHORT = {"module": "-m", "redirects": "-r", "tee": "-t"}
_HANDLED = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"})
_NO_EFFECT = frozenset(
    {"timeout", "read_timeout", "last_call_timeout", "close_timeout", "store_type", "use_libuv"}
)
"""Keys of `--rdzv-conf` for which there is nothing to do."""
_PORT = 29500
"""The port of the ranks' store with `static`."""
_APART = 1000
"""How far from there the nodes meet."""
_AT_ONCE_S = 0.001
"""Between SIGTERM and SIGKILL for `--shutdown-timeout 0`."""
_WATCHDOG = "TORCHELASTIC_ENABLE_FILE_TIMER"
"""With 1, torchrun ends ranks whose timers have run out. Source: `local_elastic_agent.py` of torch."""


_LISTED = "`torchrun --help` lists its options"


@dataclass(frozen=True)
class TorchrunLine:
    """A command line of torchrun."""

    script: str | None
    module: str | None
    args: tuple[str, ...]
    num_processes: str
    """Per node: a number, `auto`, `cpu` or `gpu`."""
    nodes: int
    node_rank: int | None
    """Among several; `None`: the line doesn't say it."""
    is_static: bool
    """Whether the backend is `static`, by which nodes have the ranks that their lines say."""
    rendezvous: str | None
    """HOST:PORT of node 0."""
    interface: str | None
    """Or an address of it."""
    join_timeout_s: float | None
    overrides: tuple[str, ...]
    """`KEY=VALUE` of a job."""
    quiet: bool
    only_local_ranks: frozenset[int] | None
    files: RankFiles | None
    """Where streams of ranks go that neither a log nor a pipe gets."""


class UnknownOption(SpecError):
    """torchrun has no such option."""

    def __init__(self, option: str) -> None:
        self.option = option
        super().__init__(f"torchrun: unrecognized arguments: {option}\n    {_LISTED}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SpecError(f"torchrun: {message}\n    {_LISTED}")


def _parser() -> _Parser:
    parser = _Parser(prog="torchrun", add_help=False)
    for name in (*SAME, *TRANSLATED, *REFUSED):
        if name.startswith("training_script"):
            continue
        names = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
        words = [*([_SHORT[name]] if name in _SHORT else []), *names]
        if name in _FLAGS:
            parser.add_argument(*words, dest=name, action="store_const", const="1")
        else:
            parser.add_argument(*words, dest=name, choices=_CHOICES.get(name))
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def read_line(words: Sequence[str], environ: Mapping[str, str]) -> TorchrunLine:
    """Reads what stands behind `torchrun`.

    Raises:
        SpecError: it is wrong, or has an option that is refused.
    """
    parsed, unknown = _parser().parse_known_args(list(words))
    if unknown:
        raise UnknownOption(unknown[0])
    given = vars(parsed)
    for name, value in given.items():
        if value is None:
            variables = {} if name in NO_VARIABLE else environ
            given[name] = variables.get(f"PET_{name.upper()}", DEFAULTS.get(name))
        if name in _FLAGS and given[name] == "0":
            given[name] = None
    is_lone = given["rdzv_backend"] == "static" and _num_nodes(given["nnodes"]) == 1
    if given["standalone"]:  # source: torch/distributed/run.py, `run`
        given |= {"rdzv_backend": "c10d", "rdzv_endpoint": None, "rdzv_id": None}
    elif is_lone and not given["rdzv_endpoint"] and given["master_port"] is None:
        given["rdzv_id"] = None  # each run has another, whatever the line says
    if given["shutdown_timeout"] is None:  # source: torch/distributed/launcher/api.py, `LaunchConfig`
        given["shutdown_timeout"] = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    for name, instead in REFUSED.items():
        if given[name] not in (None, "", DEFAULTS.get(name)):
            raise _refused(name, given[name], instead)
    python = environ.get("PYTHON_EXEC", sys.executable)
    if python != sys.executable and not (given["no_python"] or given["run_path"]):
        raise SpecError(
            f"torchrun's PYTHON_EXEC={python} has no counterpart: unset it, and start gpurun with that "
            f"Python: {python} -m gpurun torchrun …"
        )
    if environ.get(_WATCHDOG) == "1":
        raise SpecError(
            f"torchrun's {_WATCHDOG}=1 has no counterpart: unset it; `gpurun --hang-timeout 10m torchrun …` "
            "ends a program whose ranks hang"
        )
    return _line(given)


def _refused(name: str, value: str, instead: str) -> SpecError:
    text = f"--{name.replace('_', '-')}" + ("" if name in _FLAGS else f" {value}")
    return SpecError(f"torchrun's {text} has no counterpart: {instead}")


def _line(given: Mapping[str, Any]) -> TorchrunLine:
    nodes = _num_nodes(given["nnodes"])
    is_static = given["rdzv_backend"] == "static"
    if not is_static and given["rdzv_backend"] != "c10d":
        raise _refused("rdzv_backend", given["rdzv_backend"], "nodes meet at node 0, as with `c10d`")
    conf = _conf(given["rdzv_conf"] or "")
    signals = set((given["signals_to_handle"] or "").split(",")) - {""}
    if unknown := sorted(signals - _HANDLED):
        raise _refused("signals_to_handle", ",".join(unknown), f"handled are {', '.join(sorted(_HANDLED))}")
    script, args = given["training_script"], tuple(given["training_script_args"])
    if given["run_path"]:  # source: torch/distributed/run.py, `config_from_args`
        given = {**given, "no_python": None, "module": None}
    if given["no_python"] and given["module"]:
        raise SpecError("torchrun: --no-python and --module exclude each other")
    if given["no_python"]:
        script, args = BECOMES_COMMAND, (script, *args)
    is_module = given["module"] or given["no_python"]
    files = _files(given)
    endpoint, port = _addresses(given, nodes)
    return TorchrunLine(
        script=None if is_module else script,
        module=script if is_module else None,
        args=args,
        num_processes=given["nproc_per_node"],
        nodes=nodes,
        node_rank=_node_rank(given["node_rank"], conf) if nodes > 1 else None,
        is_static=is_static,
        rendezvous=endpoint,
        interface=given["local_addr"] if nodes > 1 else None,
        join_timeout_s=None if is_static else _join_timeout_s(conf),
        overrides=_overrides(given, nodes, port),
        quiet=files is None and given["redirects"] == "3" and given["tee"] == "0",
        only_local_ranks=_local_ranks(given["local_ranks_filter"] or ""),
        files=files,
    )


def _overrides(given: Mapping[str, Any], nodes: int, port: int | None) -> tuple[str, ...]:
    found = ["steps.launches=1"]
    found += [
        f"env.{name}={json.dumps(value)}"
        for option, name in VARIABLES.items()
        if (value := given[option]) is not None and (option == "rdzv_id" or value != DEFAULTS.get(option))
    ]
    if restarts := _number("--max-restarts", given["max_restarts"]):
        found.append(f"restarts={restarts}")
    if given["shutdown_timeout"] is not None:
        limit_s = _number("--shutdown-timeout", given["shutdown_timeout"])
        found.append(f"grace={limit_s or _AT_ONCE_S}s")
    if given["numa_binding"] is not None:
        if given["numa_binding"] != "node":
            raise _refused(
                "numa_binding",
                given["numa_binding"],
                "`gpurun --set bind=cores torchrun …` gives each rank its own cores",
            )
        found.append("bind=numa")
    if nodes > 1:
        found.append(f"nodes={nodes}")
    if port:
        found.append(f"master_port={port}")
    return tuple(found)


def _addresses(given: Mapping[str, Any], nodes: int) -> tuple[str | None, int | None]:
    """Where several nodes meet, and the port of the ranks' store; `None`: anywhere."""
    endpoint, host, said = given["rdzv_endpoint"], given["master_addr"], given["master_port"]
    if given["rdzv_backend"] != "static":
        return (endpoint or host) if nodes > 1 else None, None
    if endpoint:
        host, _, said = endpoint.rpartition(":")
        if not (host and said.isdecimal()):
            raise SpecError(f"torchrun: --rdzv-endpoint {endpoint} has no port: write HOST:{_PORT}")
    least = 1 if nodes > 1 else 0  # 0 is any free port, which other nodes don't know
    port = _number("--master-port", said, least) if said else _PORT if nodes > 1 else None
    apart = -_APART if port and port + _APART >= 1 << 16 else _APART
    return f"{host}:{port + apart}" if host and port and nodes > 1 else None, port


def _node_rank(said: str | None, conf: Mapping[str, str]) -> int | None:
    """The rank of this node among several, if the line says it: that of the host of the endpoint is 0."""
    is_host = conf.get("is_host", "").lower() in ("1", "true", "t", "yes", "y")
    return _number("--node-rank", said) if said is not None else 0 if is_host else None


def _num_nodes(text: str) -> int:
    least, *most = (_number("--nnodes", part, least=1) for part in text.split(":"))
    if most and most != [least]:
        raise _refused("nnodes", text, "a number of nodes that may change is `nodes: A..B` in `gpurun run`")
    return least


def _number(option: str, text: str, least: int = 0) -> int:
    if not text.strip().isdecimal() or int(text) < least:
        what = "not a whole number" + (f" of at least {least}" if least else "")
        raise SpecError(f"torchrun: {option} {text} is {what}")
    return int(text)


def _conf(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    conf = {key.strip("' "): value.strip("' ") for key, _, value in pairs}
    if unknown := sorted(conf.keys() - _NO_EFFECT - {"join_timeout", "is_host"}):
        raise _refused("rdzv_conf", unknown[0], "nodes meet at node 0, with `join_timeout` and `is_host`")
    return conf


def _join_timeout_s(conf: Mapping[str, str]) -> float | None:
    text = conf.get("join_timeout")
    return None if text is None else float(_number("--rdzv-conf join_timeout", text, least=1))


def _files(given: Mapping[str, Any]) -> RankFiles | None:
    """The files of ranks; `None`: logs keep all, so that without a directory two cases need none."""
    redirects, tee = (_streams(name, given[name]) for name in ("redirects", "tee"))
    is_plain = redirects in (0, 3) and tee == 0
    return None if is_plain and not given["log_dir"] else RankFiles(given["log_dir"] or "", redirects, tee)


def _streams(name: str, text: str) -> dict[int, int] | int:
    """Bits of streams, of all ranks or by local rank. Source: `Std.from_str` of torch's launcher."""
    if re.fullmatch("[0-3]", text):
        return int(text)
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise SpecError(f"torchrun: --{name} {text} is neither 0 to 3 nor a list such as 0:3,1:1")
    return {int(rank): int(bits) for rank, bits in (pair.split(":") for pair in text.split(","))}


def _local_ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    return frozenset(_number("--local-ranks-filter", part.strip()) for part in text.split(","))


def devices_text(line: TorchrunLine, num_gpus: int, num_cores: int, gpu_kind: str) -> str:
    """The devices that have one process each.

    Raises:
        SpecError: there are fewer GPUs than processes, or none where GPUs are asked for.
    """
    wanted, on_cpu = line.num_processes, f"cpu:{num_cores}"
    words = {"cpu": on_cpu, "auto": gpu_kind or on_cpu, "gpu": gpu_kind, "xpu": gpu_kind}
    if words.get(wanted) == "":
        raise SpecError(f"--nproc-per-node {wanted}: this machine has no GPU")
    if wanted in words:
        return words[wanted]
    num = _number("--nproc-per-node", wanted, least=1)
    if num > num_gpus > 0:
        raise SpecError(
            f"--nproc-per-node {num}: this machine has {num_gpus} GPUs\n"
            f"    for processes on the CPU: gpurun --devices cpu:{num} torchrun …"
        )
    return ",".join(f"{gpu_kind}:{index}" for index in range(num)) if num_gpus else f"cpu:{num}"
