"""Which variables a program may set before it imports torch, as its own files tell."""

from pathlib import Path

import pytest

from gpurun.launcher.processes.import_variables import may_set, set_by

FILES = {
    "sets.py": "import os\nos.environ['OMP_NUM_THREADS'] = '3'\n",
    "late.py": "import torch\nimport sets\n",
    "torch_free.py": "import json\n",
    "pkg/__init__.py": "",
    "pkg/inner.py": "from . import helper\nimport torch\n",
    "pkg/helper.py": "from .deeper import sets\n",
    "pkg/deeper/__init__.py": "",
    "pkg/deeper/sets.py": "import os\nos.environ.setdefault('TORCH_LOGS', '+dynamo')\n",
}
SCRIPTS = {
    "os.environ['OMP_NUM_THREADS'] = str(os.cpu_count())\nimport torch": True,
    "import torch\nos.environ['OMP_NUM_THREADS'] = str(os.cpu_count())": False,
    "os.environ['OMP_NUM_THREADS'] = '3'\nimport torch": False,  # `set_by` knows it
    "import numpy\nos.environ['OMP_NUM_THREADS'] = '3'\nimport torch": True,
    "os.environ['TOKENIZERS_PARALLELISM'] = str(1)\nimport torch": False,
    "os.environ[input()] = '1'\nimport torch": True,
    "if os.cpu_count() > 2:\n    os.environ['OMP_NUM_THREADS'] = '3'\nimport torch": True,
    "os.environ.update({'A': '1'}, B='2')\nimport torch": False,
    "os.environ.update({'A': '1'}, OMP_NUM_THREADS='2')\nimport torch": True,
    "os.environ.update(given)\nimport torch": True,
    "os.environ |= {'A': '1'}\nimport torch": False,
    "os.environ |= {'A': '1', 'OMP_NUM_THREADS': '2'}\nimport torch": True,
    "os.environ |= given\nimport torch": True,
    "os.putenv('OMP_NUM_THREADS', '3')\nimport torch": True,
    "os.environ.pop('TORCH_LOGS', None)\nimport torch": True,
    "del os.environ['TORCH_LOGS']\nimport torch": True,
    "print(os.environ['OMP_NUM_THREADS'], os.environ.get('OMP_NUM_THREADS'))\nimport torch": False,
    "def set():\n    os.environ['OMP_NUM_THREADS'] = '3'\nset()\nimport torch": True,
    "import torch\ndef set():\n    os.environ['OMP_NUM_THREADS'] = '3'\nset()": False,
    "def main():\n    import torch\ndef set():\n    os.environ['OMP_NUM_THREADS'] = '3'\nset()\nmain()": True,
    "if TYPE_CHECKING:\n    import torch\nimport sets\nimport torch": True,
    "try:\n    import torch\nexcept ImportError:\n    raise\nimport sets": False,
    "try:\n    import torch\nexcept ImportError:\n    raise\nos.environ['OMP_NUM_THREADS'] = '3'": False,
    "import sets\nimport torch": True,
    "import torch_free\nimport torch\nimport sets": False,
    "import torch_free, sets": True,
    "import late\nimport sets": False,
    "from pkg.inner import work": True,
    "import pkg\nimport torch\nimport pkg.inner": False,
    "from torch import nn\nimport sets": False,
    "print('\\d')\nos.environ['OMP_NUM_THREADS'] = str(1)\nimport torch": True,  # Python warns of that escape
    "not Python": False,
}


@pytest.mark.parametrize("text", SCRIPTS)
def test_what_a_script_may_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    script = tmp_path / "train.py"
    script.write_text(f"import os\n{text}\n" if text != "not Python" else text)
    assert may_set(str(script), None) == SCRIPTS[text]
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "as_module"
    package.mkdir()
    script.rename(package / "__main__.py")
    is_constant = text.startswith("os.environ['OMP_NUM_THREADS'] = '3'")  # of a module, all are found here
    assert may_set(None, "as_module") == (SCRIPTS[text] or is_constant)


@pytest.mark.parametrize(
    ("text", "is_before"),
    [
        ("try:\n    import torch\nexcept ImportError:\n    raise", False),
        ("with open(__file__):\n    from torch import nn", False),
        ("import torch", False),
        ("try:\n    import tomllib\nexcept ImportError:\n    raise", True),
    ],
)
def test_a_variable_is_set_before_what_no_statement_imports_earlier(text: str, is_before: bool) -> None:
    source = f"import os\n{text}\nos.environ['OMP_NUM_THREADS'] = '3'\n"
    assert set_by(source.encode(), {}) == ({"OMP_NUM_THREADS": "3"} if is_before else {})


def test_what_python_warns_of_in_a_script_hides_no_variable() -> None:
    source = b"import os\nprint('\\d')\nos.environ['OMP_NUM_THREADS'] = '3'\nimport torch"
    assert set_by(source, {}) == {"OMP_NUM_THREADS": "3"}


def test_modules_that_import_each_other_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import b\n")
    (tmp_path / "b.py").write_text("import a\nimport sets\n")
    (tmp_path / "sets.py").write_text(FILES["sets.py"])
    assert may_set(str(tmp_path / "a.py"), None)
    assert not may_set(str(tmp_path / "no_such.py"), None)
