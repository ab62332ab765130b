"""A job file as text and as a tree, with all that is wrong with it before its keys are looked at."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import gpurun
from gpurun.launcher.errors import Problem, SpecError
from gpurun.launcher.jobfile.yaml.tree import MAX_NODES, Mark, Unreadable, YamlNode, compose
from gpurun.launcher.jobfile.yaml.tree import Path as KeyPath
from gpurun.launcher.units import first_of, format_count

MAX_BYTES = 1_000_000
"""A job file has about a thousand bytes."""

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]")
"""Characters that YAML does not allow.  Source: https://yaml.org/spec/1.2.2/#51-character-set"""

MOST_FILES = 5
"""The most files of a directory that a message names."""
_WRITE_ONE = "`gpurun init` writes a job file to start from"


@dataclass(frozen=True)
class Source:
    """A job file and the mistakes found so far; knows where every key and value is."""

    file: str
    text: str
    root: YamlNode = field(compare=False, repr=False)
    problems: tuple[Problem, ...] = ()

    def problem(self, path: KeyPath, message: str, hint: str | None = None) -> Problem:
        """A mistake in the value at `path`."""
        return replace(self.root.mark_of_value(path).problem(message, hint), path=path)

    def key_problem(self, path: KeyPath, message: str, hint: str | None = None) -> Problem:
        """A mistake in the key at the end of `path`."""
        return replace(self.root.mark_of_key(path).problem(message, hint), path=path)


def read_source(path: Path) -> Source:
    """The file's tree.

    Raises:
        SpecError: it can't be read, or is no YAML document.
    """
    return parse_source(_read_bytes(path), str(path))


def parse_source(content: bytes, file: str) -> Source:
    """Like `read_source`, for bytes."""
    if len(content) > MAX_BYTES:
        raise SpecError(
            Problem(f"larger than {format_count(MAX_BYTES)} bytes: this can't be a job file", file=file)
        )
    text = _decode(content, file)
    root, problems = compose(text, file)
    if root.value is None and not problems:
        hint = _WRITE_ONE
        raise SpecError(Problem("the file is empty", hint, file))
    return Source(file, text, root, tuple(problems))


def override_source(source: Source, overrides: tuple[str, ...]) -> Source:
    """The source with every `key.path=value` put in its place; null removes the key.

    An override that has no `=`, is no YAML, or leads through something that is no mapping becomes one of the
    source's problems.
    """
    for override in overrides:
        try:
            source = _override(source, override)
        except SpecError as error:
            source = replace(source, problems=(*source.problems, *error.problems))
    return source


def _override(source: Source, override: str) -> Source:
    key, equals, text = override.partition("=")
    key = key.strip()
    option = Mark(f"--set {key}")
    if not equals or not all(key.split(".")):
        raise SpecError(
            Problem("expected key.path=value", "for example --set steps.rounds=7", f"--set {override}")
        )
    value, problems = _override_value(text, option)
    path = tuple(key.split("."))
    is_null = value.value is None and "params" not in path[:-1]  # an argument may be null
    if is_null and (root := source.root.without(path)) is not source.root and not problems:
        return replace(source, root=root)
    root = _put(source.root, path, value, option)
    if root.size > MAX_NODES:
        raise SpecError(option.problem(f"the job now contains more than {format_count(MAX_NODES)} values"))
    return Source(source.file, source.text, root, (*source.problems, *problems))


def _override_value(text: str, option: Mark) -> tuple[YamlNode, Sequence[Problem]]:
    try:
        _check_characters(text, option.file)
        return compose(text, option.file, has_lines=False)
    except SpecError as error:
        return YamlNode(Unreadable(), option), error.problems


def _put(node: YamlNode, steps: tuple[str, ...], value: YamlNode, option: Mark) -> YamlNode:
    if not steps:
        return value
    step = _step(node, steps[0], option)
    child = node.child(step) or YamlNode({}, option)
    return node.with_child(step, _put(child, steps[1:], value, option))


def _step(node: YamlNode, text: str, option: Mark) -> str | int:
    if isinstance(node.value, dict):
        return text
    if not isinstance(node.value, tuple):
        raise SpecError(option.problem(f"can't set `{text}`: the value that contains it is not a mapping"))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and int(text) < len(node.value)):
        raise SpecError(
            option.problem(
                f"`{text}` is not an index into a list of length {len(node.value)} (indices start at 0)"
            )
        )
    return int(text)


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise SpecError(Problem("there is no such file", _near_files(path), str(path))) from error
    except IsADirectoryError as error:
        raise SpecError(Problem("this is a directory, not a job file", _files_in(path), str(path))) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError(Problem(f"can't be read: {reason}", file=ascii(str(path))[1:-1])) from error


def _near_files(path: Path) -> str:
    import difflib

    files = {name.lower(): name for name in _job_files(path.parent)}
    near = difflib.get_close_matches(path.name.lower(), files, n=1, cutoff=0.75)
    if near:
        return f"did you mean {path.with_name(files[near[0]])}?"
    if (Path(gpurun.__file__).parent / "examples" / path.name).is_file():
        return f"to copy gpurun's own: gpurun examples {path.name} --copy {path.parent}"
    return _WRITE_ONE


def _files_in(directory: Path) -> str:
    files = _job_files(directory)
    return f"it holds {first_of(files, MOST_FILES)}" if files else _WRITE_ONE


def _job_files(directory: Path) -> list[str]:
    try:
        return sorted(file.name for file in directory.iterdir() if file.suffix in {".yaml", ".yml"})
    except OSError:
        return []


def _decode(content: bytes, file: str) -> str:
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8")
        message = f"not UTF-8: a stray byte 0x{content[error.start]:02x}"
        raise SpecError(_at_end_of(before, file).problem(message, "save the file as UTF-8")) from error
    _check_characters(text, file)
    return text


def _check_characters(text: str, file: str) -> None:
    found = _CONTROL.search(text)
    if found:
        message = f"the control character U+{ord(found[0]):04X} is not allowed in YAML"
        raise SpecError(_at_end_of(text[: found.start()], file).problem(message, "delete it"))


def _at_end_of(text: str, file: str) -> Mark:
    return Mark(file, text.count("\n") + 1, len(text) - text.rfind("\n"))
