"""What Python itself does for a program: its forked children, modules, loggers and streams."""

from pathlib import Path

import pytest

from tests.integration.command import gpurun, write

CHILDREN = """
    import atexit, os, sys
    {above}
    rank, parent = os.getpid(), os.getpid()
    atexit.register(lambda: os.write(1, b"parent ends\\n" if os.getpid() == rank else b"child ends\\n"))
    for how in ("exit", "text", "raise", "end"):
        pid = os.fork()
        if pid:
            print(how, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            print(open(how).read())
            continue
        left_open = open(how, "w")
        left_open.write("data of " + how)
        if how == "exit":
            sys.exit(3)
        if how == "text":
            sys.exit("bad")
        if how == "raise":
            raise ValueError("in the child")
        break
    facts = f"{os.environ['GPURUN_LAUNCH_DIR']}/../facts.json"
    assert how == "end" and not os.path.exists(facts)
"""


@pytest.mark.parametrize("above", ["", "import sys, os; os.environ['TORCH_LOGS'] = ''.join(['recompiles'])"])
def test_forked_children_end_as_python_ends_them(tmp_path: Path, above: str) -> None:
    write(tmp_path, "train.py", CHILDREN.replace("{above}", above))
    result = gpurun(tmp_path, "torchrun", "train.py").ended(0)
    ended = [f"child ends\n{how} {code}\ndata of {how}\n" for how, code in ENDS.items()]
    assert result.out == "".join(ended) + "parent ends\n"
    trace = 'Traceback (most recent call last):\n  File "{}", line {}, in <module>\n'
    lines = (tmp_path / "train.py").read_text().splitlines()
    line = 1 + lines.index('        raise ValueError("in the child")')
    failed = trace.format(tmp_path / "train.py", line) + '    raise ValueError("in the child")\n'
    assert f"bad\n{failed}ValueError: in the child\n" in result.err


ENDS = {"exit": 3, "text": 1, "raise": 1, "end": 0}
