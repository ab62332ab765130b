"""Files of the ranks' stdout and stderr, as torchrun writes them below its `--log-dir`.

Source: torch/distributed/elastic/multiprocessing/api.py, `DefaultLogsSpecs`.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from gpurun.launcher.errors import MachineError

STDOUT, STDERR = 1, 2
"""Bits of what torchrun's `--redirects` and `--tee` say of a rank."""
_STREAMS = {STDOUT: "stdout", STDERR: "stderr"}


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Of a rank: where torch's `record` writes why a function failed. Of the command: where that is copied."""


def write_error(written: str, target: str, code: int | None) -> None:
    """Copies what `record` has written, with the exit code of the rank. Nothing where it has written nothing.

    Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py, `dump_error_file`
    """
    with suppress(OSError, ValueError, RecursionError):
        error = json.loads(Path(written).read_bytes())
        match error:
            case {"message": dict(message)} if code:
                message["errorCode"] = code
        Path(target).write_text(json.dumps(error))


def line_prefix(env: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """What torchrun writes before a line of a rank that `--tee` shows.

    Source: torch/distributed/elastic/multiprocessing/tail_log.py and `local_elastic_agent.py`
    """
    template = Template(
        environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or "[${role_name}${local_rank}]:"
    )
    names = {"role_name": "ROLE_NAME", "rank": "RANK", "local_rank": "LOCAL_RANK"}
    return template.safe_substitute({name: env[variable] for name, variable in names.items()})


@dataclass
class RankFiles:
    """Which streams of this node's ranks go to files instead of their logs, and which of those are shown."""

    directory: str
    """`--log-dir`; empty: the one of the ranks' logs."""
    redirects: Mapping[int, int] | int
    """Bits by local rank, or of all."""
    tee: Mapping[int, int] | int
    passed: int = 0
    """Bits of streams that are passed on from files, of all ranks: these can't open the command's own."""
    _place: Path | None = field(default=None, init=False)
    """The directory of this command below it."""

    def of(self, env: Mapping[str, str], log: str) -> dict[str, str]:
        """The fields of the `StartRequest` of a rank with this environment and log; creates its directory.

        Raises:
            MachineError: that can't be written.
        """
        if self.directory == os.devnull:  # streams stay as they are then, as under torchrun
            return {}
        redirected = _bits(self.redirects, env) | _bits(self.tee, env) | self.passed
        try:
            if self._place is None:
                base = os.path.abspath(self.directory or os.path.dirname(log))
                os.makedirs(base, exist_ok=True)
                run_id = env["TORCHELASTIC_RUN_ID"]
                self._place = Path(tempfile.mkdtemp(prefix=f"{run_id}_", dir=base))
            place = self._rank_directory(self._place, env)
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
        except OSError as error:
            raise MachineError(f"--log-dir {self.directory}: {error.strerror}") from error
        return {name: str(place / f"{name}.log") for bit, name in _STREAMS.items() if redirected & bit}

    def env(self, env: Mapping[str, str]) -> dict[str, str]:
        """The variable that names the file of torch's `record`, for a rank for which `of` was called."""
        if self._place is None or not self.directory:
            return {}
        return {ERROR_FILE: str(self._rank_directory(self._place, env) / "error.json")}

    def shown(self, env: Mapping[str, str]) -> Iterator[tuple[Path, bool, bool]]:
        """The shown files of a rank for which `of` was called, with whether they are stdout, and tee's."""
        if self._place is not None:
            tee, passed = _bits(self.tee, env), self.passed & ~_bits(self.redirects, env)
            for bit, name in _STREAMS.items():
                if (tee | passed) & bit:
                    path = self._rank_directory(self._place, env) / f"{name}.log"
                    yield path, bit == STDOUT, bool(tee & bit)

    def _rank_directory(self, place: Path, env: Mapping[str, str]) -> Path:
        """Next to the logs, which nodes may share, it has the rank's own number."""
        number = env["LOCAL_RANK" if self.directory else "RANK"]
        return place / f"attempt_{env['TORCHELASTIC_RESTART_COUNT']}" / number


def _bits(which: Mapping[int, int] | int, env: Mapping[str, str]) -> int:
    return which if isinstance(which, int) else which.get(int(env["LOCAL_RANK"]), 0)
