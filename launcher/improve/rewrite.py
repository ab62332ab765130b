"""Calls in a user's source and keys of a job file get other values: the changed bytes, and the diff.

Text is put into the old source at places that `ast` reports, so that all else stays byte for byte. The result
is parsed again: an edit after which anything but the intended nodes differs counts as one without a place.
"""

import ast
import contextlib
import difflib
import errno
import io
import os
import re
import stat
import tokenize
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from gpurun.launcher.errors import MachineError, SpecError, unwritable
from gpurun.launcher.jobfile.yaml.describe import flow_text
from gpurun.launcher.jobfile.yaml.tree import parse_source
from gpurun.launcher.machine.accelerators import ACCELERATORS
from gpurun.launcher.machine.git import uninterrupted, why_untracked
from gpurun.launcher.rundir.files import replacing
from gpurun.launcher.rundir.improvement import CallChange
from gpurun.launcher.rundir.records import NEEDS_WORKERS
from gpurun.launcher.syntax import parsed

ESCAPED = {ord(char): f"\\{letter}" for char, letter in zip('\a\b\t\n\v\f\r"\\', 'abtnvfr"\\', strict=True)}
"""How git writes characters in names; others that aren't printable as octal numbers."""
WIDTH = 100
"""Columns up to which a line takes one more argument."""
MAX_SHOWN = 80
"""Characters of a call that are shown."""
NEWLINE = re.compile(r"\r\n|\r|\n")  # `str.splitlines` knows more of them than Python's grammar
WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
CODE_OR_COMMENT = re.compile(r"#[^\r\n]*|[^\s\\]")
REST_OF_LINE = re.compile(r"[ \t\f]*(?:#[^\r\n]*)?(?=[\r\n])")
WORKERS = "num_workers"
SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
"""Statements before which a line runs as often as they do: none of the headers of `while`, `elif`, `case`."""
ITSELF = (
    *("to", "float", "double", "half", "bfloat16", "train", "eval", "requires_grad_"),
    *(kind.name for kind in ACCELERATORS.values()),
)
"""Methods of a module that return it. Source: torch/nn/modules/module.py."""
MAYBE_NOT_RUN = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Expressions whose parts run under a condition, later, or with names of their own."""
TAKES = frozenset({"next", "pop", "popitem", "popleft", "setdefault"})
"""Functions and methods that change what they are called on."""


Node = ast.expr | ast.stmt | ast.keyword


class NoPlaceError(ValueError):
    """An edit that can't be made, or not surely."""


@dataclass(frozen=True)
class Splice:
    """Text that replaces characters of the old text; an insertion where `start` is `end`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Line:
    """Statements on lines of their own, before or after another one."""

    statement: ast.stmt
    text: str
    is_after: bool


class SourceText:
    """The text of a source file and its tree; places are indices of characters.

    Raises:
        SyntaxError, ValueError, LookupError: Python can't read the file, or its codec doesn't give it back.
    """

    def __init__(self, source: bytes) -> None:
        self.encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        self.text = source.decode(self.encoding)
        if self.text.encode(self.encoding) != source:
            raise NoPlaceError(f"{self.encoding} doesn't give back what it has read")
        self.tree = parsed(source)
        self.newlines = list(NEWLINE.finditer(self.text))
        self.starts = [0, *(newline.end() for newline in self.newlines)]

    def start(self, node: Node) -> int:
        return self._place(node.lineno, node.col_offset)

    def end(self, node: Node) -> int:
        return self._place(node.end_lineno or 0, node.end_col_offset or 0)

    def _place(self, line: int, column: int) -> int:
        """The index of a character; `column` is `ast`'s, in bytes of UTF-8 for any encoding of the file."""
        start, end = [*self.starts[line - 1 : line + 1], len(self.text)][:2]
        return start + len(self.text[start:end].encode()[:column].decode())

    def line_start(self, place: int) -> int:
        return self.starts[bisect_right(self.starts, place) - 1]

    def newline(self, place: int) -> str:
        """As the line of a place ends; a last line without an end is like the line above."""
        near = self.newlines[: bisect_right(self.starts, place)]
        return near[-1][0] if near else "\n"

    def indent(self, place: int) -> str:
        """The white space that the line begins with, up to the place."""
        return "".join(takewhile(" \t\f".__contains__, self.text[self.line_start(place) : place]))

    def step(self, outer: str) -> str:
        """By how much the file indents, below a line that is indented by `outer`."""
        if outer.startswith("\t"):
            return "\t"
        blocks = (body for node in self.tree.body if (body := getattr(node, "body", None)))
        return next((step for body in blocks if (step := self.indent(self.start(body[0])))), "    ")

    def is_short(self, place: int, more: str) -> bool:
        """Whether the line has room for more text."""
        start = self.line_start(place)
        newline = NEWLINE.search(self.text, place)
        line = self.text[start : newline.start() if newline else None]
        return len(line.expandtabs()) + len(more) <= WIDTH

    def spliced(self, splices: Sequence[Splice]) -> bytes:
        """The source with other text in these places; of insertions in one place, the first comes first.

        Raises:
            NoPlaceError: two of them change the same text.
        """
        parts, done = list[str](), 0
        for splice in sorted(splices, key=lambda splice: (splice.start, splice.end)):
            if splice.start < done:
                raise NoPlaceError("two edits change the same text")
            parts += [self.text[done : splice.start], splice.text]
            done = splice.end
        return "".join([*parts, self.text[done:]]).encode(self.encoding)


def rewritten(source: bytes, edits: Sequence[CallChange]) -> tuple[bytes, tuple[CallChange, ...]]:
    """The changed source, and the edits that found no place.

    These are edits without a call of the name at the line, or with several; of an argument that `*args` or
    `**kwargs` may hold; that contradict an earlier one; with a statement before or after what isn't a simple
    statement on lines of its own, or about what has no name. All, if Python can't read the source.
    """
    changed, made, left = source, list[CallChange](), list[CallChange]()
    for edit in edits:
        try:
            changed = _with_all(source, [*made, edit])
            made.append(edit)
        except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError):
            left.append(edit)
    return changed, tuple(left)


def line_to_write(edit: CallChange, source: bytes = b"") -> str:
    """The line that a person writes for a change that found no place: 'DataLoader(…, num_workers=4)'.

    Args:
        source: of the file: a call that is found there is shown as it is written.
    """
    new = ", ".join(f"{name}={value!r}" for name, value in edit.arguments.items())
    written = _written_call(edit, source)
    first = edit.parameters[0] if edit.parameters else "…"
    statements = edit.after.replace("{0}", "…").replace("\n", "; ")
    if edit.before:
        return f"{edit.before.replace('{0}', first)} before {written or f'{edit.call}(…)'}"
    if statements:
        return f"{statements} after {written or f'{edit.call}(…)'}"
    return f"{new} in {written}" if written else f"{edit.call}(…, {new})"


def lost_options(source: bytes, edits: Iterable[CallChange]) -> Iterator[str]:
    """Notes on options of argparse, as in `num_workers=args.workers`, whose place a change takes.

    Args:
        edits: those that have found a place.
    """
    tree = parsed(source)
    options = dict(_option_of(node) for node in ast.walk(tree) if isinstance(node, ast.Call))
    for edit in edits:
        call = _call_of(tree, edit)
        for name, value in edit.arguments.items():
            match _passed(call, name, edit.parameters):
                case ast.Attribute(value=ast.Name(id=args), attr=attribute) if attribute in options:
                    option = options[attribute]
                    other = "" if isinstance(value, bool) else f"; {option} {value} instead may do as well"
                    yield (
                        f"{edit.file}:{edit.line}: {name}={value!r} takes the place of {args}.{attribute}, "
                        f"so that {option} has no effect there{other}"
                    )


def _option_of(call: ast.Call) -> tuple[str, str]:
    """The attribute and the option that `add_argument("--workers")` makes; empty: it makes none."""
    match call:
        case ast.Call(func=ast.Attribute(attr="add_argument"), args=args, keywords=keywords):
            names = [each.value for each in args if isinstance(each, ast.Constant)]
            options = [name for name in names if isinstance(name, str) and name.startswith("-")]
            option = next((name for name in options if name.startswith("--")), "".join(options[:1]))
            stated = (each.value for each in keywords if each.arg == "dest")
            dest = next((each.value for each in stated if isinstance(each, ast.Constant)), None)
            return str(dest or option.lstrip("-").replace("-", "_")), option
    return "", ""


def _written_call(edit: CallChange, source: bytes) -> str:
    """The call as the source has it, on a line and shortened; empty: it isn't known which one it is."""
    with contextlib.suppress(SyntaxError, ValueError, LookupError, RecursionError, MemoryError):
        calls = _calls_at(SourceText(source).tree, edit.line)
        texts = [ast.unparse(call) for call in calls if call.end_col_offset == edit.end_column]
        if len(texts) == 1:
            return texts[0] if len(texts[0]) <= MAX_SHOWN else f"{texts[0][:MAX_SHOWN]}…"
    return ""


def _with_all(source: bytes, edits: Sequence[CallChange]) -> bytes:
    """Raises what `SourceText` does, and NoPlaceError."""
    page = SourceText(source)
    parents = {child: node for node in ast.walk(page.tree) for child in ast.iter_child_nodes(node)}
    replaced = dict[ast.expr, str]()
    appended = dict[ast.Call, dict[str, str]]()
    lines = dict[Line, None]()  # in order, each once
    placed = [(edit, _call_of(page.tree, edit)) for edit in edits]
    sure = {call for edit, call in placed if WORKERS in edit.arguments}
    for edit, call in placed:
        for name, value in edit.arguments.items():
            passed = _passed(call, name, edit.parameters)
            text = repr(value) if call in sure else _guarded(call, name, value, edit.parameters)
            was = replaced.get(passed) if passed else appended.get(call, {}).get(name)
            if was not in (None, text):
                raise NoPlaceError(f"another edit sets {name}={was}")
            if passed:
                _check_value(passed)
                replaced[passed] = text
            else:
                appended.setdefault(call, {})[name] = text
        if edit.before or edit.after:
            lines[_line_of(page, call, edit, parents)] = None

    splices = [Splice(page.start(old), page.end(old), new) for old, new in replaced.items()]
    for call, new in appended.items():
        splices += _appended(page, call, [f"{name}={value}" for name, value in new.items()])
    splices += (_inserted(page, line) for line in lines)
    changed = page.spliced(splices)

    for old, text in replaced.items():
        _put(parents[old], old, expression(text))
    for call, new in appended.items():
        call.keywords += [ast.keyword(name, expression(value)) for name, value in new.items()]
    for line in lines:
        if not line.is_after:
            _put(parents[line.statement], line.statement, *ast.parse(line.text).body, line.statement)
    for line in reversed(lines):
        if line.is_after:
            _put(parents[line.statement], line.statement, line.statement, *ast.parse(line.text).body)
    if ast.dump(page.tree) != ast.dump(parsed(changed)):
        raise NoPlaceError("more would change than was meant")
    return changed


def _guarded(call: ast.Call, name: str, value: Any, parameters: Sequence[str]) -> str:
    """The text of a value; what a DataLoader refuses without workers depends on their number.

    Other calls at the same place, and other command lines, may ask for none.

    Raises:
        NoPlaceError: that number isn't known, or can't be written twice.
    """
    workers = _passed(call, WORKERS, parameters) if name in NEEDS_WORKERS else None
    if workers is None or isinstance(workers, ast.Constant):
        return repr(value)
    _check_value(workers)
    has_some = ast.Compare(workers, [ast.Gt()], [ast.Constant(0)])
    otherwise = ast.Constant(NEEDS_WORKERS[name])
    return ast.unparse(has_some if value is True else ast.IfExp(has_some, expression(repr(value)), otherwise))


def _check_value(written: ast.expr) -> None:
    """Returns if an expression only gives a value, as far as its text says.

    Raises:
        NoPlaceError: it also binds a name, or takes something away from where others look for it.
    """
    for node in ast.walk(written):
        takes = isinstance(node, ast.Call) and not TAKES.isdisjoint(_names(node.func, {}))
        if takes or isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            raise NoPlaceError(f"{ast.unparse(written)} does more than give a value")


def expression(text: str) -> ast.expr:
    """Raises NoPlaceError for `inf` and `nan`, which mean nothing in a source file."""
    value = ast.parse(text, mode="eval").body
    if {"inf", "nan"} & {getattr(node, "id", "") for node in ast.walk(value)}:
        raise NoPlaceError(f"{text} has no literal")
    return value


def _put(parent: ast.AST, old: ast.AST, *new: ast.AST) -> None:
    """Other nodes take the place of a node in its parent."""
    for name, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, name, new[0])
        elif isinstance(value, list) and old in value:
            at = value.index(old)
            value[at : at + 1] = new


def _call_of(tree: ast.Module, edit: CallChange) -> ast.Call:
    originals = defaultdict[str, set[str]](set)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                originals[alias.asname or alias.name].add(alias.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Attribute):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    originals[target.id] |= {target.id, *_names(node.value, originals)}
    known = edit.end_column is not None
    calls = [
        node
        for node in _calls_at(tree, edit.line)
        if not known or node.end_col_offset == edit.end_column
        if edit.call in _names(node.func, originals) or (known and _is_of_base(node.func))
    ]
    if len(calls) != 1:
        raise NoPlaceError(f"{len(calls)} calls of {edit.call} at line {edit.line}")
    return calls[0]


def _calls_at(tree: ast.Module, line: int) -> list[ast.Call]:
    """The calls at a line, from left to right."""
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        # A call of an attribute is reported at the line of the attribute's name, or of the whole expression.
        if line in (node.lineno, node.func.end_lineno if isinstance(node.func, ast.Attribute) else None)
    ]
    return sorted(found, key=lambda call: (call.end_lineno or 0, call.end_col_offset or 0))


def _is_of_base(called: ast.expr) -> bool:
    """Whether it is `super().__init__`, by which a class of the user's own calls the constructor."""
    match called:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr="__init__"):
            return True
    return False


def _names(called: ast.expr, originals: Mapping[str, set[str]]) -> Iterable[str]:
    """The names that a called function may have in the module that it was imported from."""
    match called:
        case ast.Attribute(attr=name):
            return {name}
        case ast.Name(id=name):
            return originals.get(name, {name})
        case ast.Subscript(value=value):  # DataLoader[int]
            return _names(value, originals)
    return ()


def _passed(call: ast.Call, name: str, parameters: Sequence[str]) -> ast.expr | None:
    """The value that a call gives a parameter, if it does.

    Raises:
        NoPlaceError: it may be among `*args` or `**kwargs`.
    """
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    plain = list(takewhile(lambda argument: not isinstance(argument, ast.Starred), call.args))
    for parameter, argument in zip(parameters, plain, strict=False):
        if parameter == name:
            return argument
    is_positional = name in parameters or not parameters
    if (is_positional and plain != call.args) or any(keyword.arg is None for keyword in call.keywords):
        raise NoPlaceError(f"{name} may be in *args or **kwargs")
    return None


def _line_of(page: SourceText, call: ast.Call, edit: CallChange, parents: Mapping[ast.AST, ast.AST]) -> Line:
    """The line that an edit adds to that of its call."""
    if edit.before:
        try:
            first = _first_name(call, edit.parameters) if "{0}" in edit.before else ""
            return Line(_statement_of(page, call, parents), edit.before.replace("{0}", first), False)
        except NoPlaceError:
            if not edit.after:
                raise
    statement = parents[call]
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not _is_alone(page, statement):
        raise NoPlaceError("no line after the statement can stand for one after the call")
    return Line(statement, edit.after.replace("{0}", _dotted(statement.targets[0])), True)


def _inserted(page: SourceText, line: Line) -> Splice:
    place = page.start(line.statement)
    indent, end = page.indent(place), page.newline(place)
    text = "".join(f"{indent}{each}{end}" for each in line.text.split("\n"))
    if not line.is_after:
        start = page.line_start(place)
        return Splice(start, start, text)
    newline = NEWLINE.search(page.text, page.end(line.statement))
    if newline is None:  # the last line of a file, which doesn't end
        return Splice(len(page.text), len(page.text), end + text.removesuffix(end))
    return Splice(newline.end(), newline.end(), text)


def _is_alone(page: SourceText, statement: ast.stmt) -> bool:
    """Whether nothing else is on its lines, comments apart."""
    start, end = page.start(statement), page.end(statement)
    begins_line = page.line_start(start) + len(page.indent(start)) == start
    return begins_line and re.match(r"[ \t\f]*(#[^\r\n]*)?(?:[\r\n]|\Z)", page.text[end:]) is not None


def _first_name(call: ast.Call, parameters: Sequence[str]) -> str:
    """'model.net' of `DDP(model.net)` and of `DDP(model.net.to(rank))`, also where it is passed by name."""
    named = [keyword.value for keyword in call.keywords if keyword.arg in parameters[:1]]
    node = next(iter([*call.args, *named]), None)
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ITSELF:
        node = node.func.value
    return _dotted(node)


def _dotted(name: ast.expr | None) -> str:
    """Raises NoPlaceError for what isn't a (dotted) name."""
    node = name
    while isinstance(node, ast.Attribute):
        node = node.value
    if name is None or not isinstance(node, ast.Name):
        raise NoPlaceError("what the statement is about has no name")
    return ast.unparse(name)


def _statement_of(page: SourceText, call: ast.Call, parents: Mapping[ast.AST, ast.AST]) -> ast.stmt:
    """The statement with the call in it, where a line before it runs as often as the call, and before it."""
    node: ast.AST = call
    is_sure = True
    while not isinstance(node, ast.stmt):
        node = parents[node]
        is_sure = is_sure and not isinstance(node, MAYBE_NOT_RUN)
    binds = any(isinstance(part, ast.NamedExpr) for part in ast.walk(node))
    start = page.start(node)
    begins_line = page.line_start(start) + len(page.indent(start)) == start
    if not is_sure or binds or not begins_line or not isinstance(node, SIMPLE):
        raise NoPlaceError("no line before the statement can stand for one before the call")
    return node


def _appended(page: SourceText, call: ast.Call, new: Sequence[str]) -> list[Splice]:
    """Puts arguments after the last one, laid out as the call is."""
    text, close = page.text, page.end(call) - 1
    after_name = CODE_OR_COMMENT.finditer(text, page.end(call.func), close)
    opened = next(code.end() for code in after_name if code[0] == "(")
    arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    if not arguments:
        return [Splice(opened, opened, ", ".join(new))]
    if page.end(arguments[0]) > close:  # a generator in the call's own parentheses, which it can't share
        return [Splice(opened, opened, "("), Splice(close, close, f"), {', '.join(new)}")]
    at, is_comma = max(map(page.end, arguments)), False
    for code in CODE_OR_COMMENT.finditer(text, at, close):  # parentheses around the last argument, a comma
        if not code[0].startswith("#"):
            at, is_comma = code.end(), code[0] == ","
    inline = f" {', '.join(new)}," if is_comma else f", {', '.join(new)}"
    last = max(map(page.start, arguments))
    line = page.line_start(last)
    has_own_line = line > opened and not text[line:last].strip(" \t\f(")
    if not has_own_line and page.is_short(at, inline):
        return [Splice(at, at, inline)]

    end, comma = page.newline(at), "" if is_comma else ","
    outer = page.indent(opened)
    if not NEWLINE.search(text, opened, close):  # all arguments go to a line between the parentheses
        indent = f"{end}{outer}{page.step(outer)}"
        if len(f"{indent}{text[opened:at]}{inline}") > WIDTH:
            inline = comma + "".join(f"{indent}{argument}," for argument in new)
        first = min(map(page.start, arguments))
        blank = len(text[opened:first]) - len(text[opened:first].lstrip())
        return [Splice(opened, opened + blank, indent), Splice(at, close, f"{inline}{end}{outer}")]
    visual = outer + " " * (opened - page.line_start(opened) - len(outer))
    indent = end + (page.indent(last) if line > opened else visual)
    if rest := REST_OF_LINE.match(text, at):  # the parenthesis closes on a line of its own
        after = "".join(f"{indent}{argument}," for argument in new)
        return [Splice(at, at, comma), Splice(rest.end(), rest.end(), after)]
    after = ",".join(f"{indent}{argument}" for argument in new)
    return [Splice(at, at, f"{comma}{after}{',' if is_comma else ''}")]


def diff_text(changes: Mapping[Path, tuple[bytes, bytes]], root: Path) -> str:
    """A unified diff of old and new bytes as `git diff` writes it, for `patch -p1` in `root`.

    `git apply` takes it where `root` is the top directory of the repository; below that, it skips all files.
    Bytes that aren't UTF-8 are surrogates: write it with `errors="surrogateescape"` and `newline=""`.

    Raises:
        SpecError: a file is outside of `root`.
    """
    return "".join(
        _diff(_relative(path, root), *changes[path]) for path in sorted(changes) if len({*changes[path]}) > 1
    )


def _diff(name: str, old: bytes, new: bytes) -> str:
    a, b = _quoted(f"a/{name}"), _quoted(f"b/{name}")
    tab = "\t" if " " in name else ""  # ends a name with blanks, for `patch`
    before, after = (
        [line for line in re.split(r"(?<=\n)", content.decode(errors="surrogateescape")) if line]
        for content in (old, new)
    )
    lines = difflib.unified_diff(before, after, f"{a}{tab}", f"{b}{tab}")
    ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return f"diff --git {a} {b}\n{''.join(ended)}"


def _quoted(name: str) -> str:
    """As git writes names that aren't plain ASCII."""
    escaped = "".join(
        ESCAPED.get(byte) or (chr(byte) if 31 < byte < 127 else f"\\{byte:03o}") for byte in os.fsencode(name)
    )
    return name if escaped == name else f'"{escaped}"'


def _relative(path: Path, root: Path) -> str:
    """Raises SpecError where a link or `..` leads out of `root`."""
    place = path.parent.resolve() / path.name
    if path.name == ".." or not place.is_relative_to(root.resolve()):
        raise SpecError(f"{path} is outside of {root}; start in the directory that all changed files are in")
    return place.relative_to(root.resolve()).as_posix()


def write_changes(changes: Mapping[Path, tuple[bytes, bytes]], root: Path, force: bool = False) -> None:
    """Replaces old bytes by new ones, in all files or in none; owners, permissions and attributes stay.

    Raises:
        SpecError: a file is outside of `root`, is a link, has changed or can't be written; without `force`,
            also if it is in no work tree of git or has other hard links. Nothing is written.
        MachineError: the disk is full or fails.
    """
    for path, (old, _) in changes.items():
        _relative(path, root)
        _check(path, old, force)
    with uninterrupted():
        try:
            _replace_files({path: new for path, (_, new) in changes.items()})
        except MachineError:
            for path, (old, new) in changes.items():
                with contextlib.suppress(OSError, MachineError):
                    if path.read_bytes() == new:  # its rename came before the one that failed
                        _replace_files({path: old})
            raise


def _replace_files(contents: Mapping[Path, bytes]) -> None:
    """Replaces the content of files, once all drafts are on the disk.

    Raises:
        MachineError: a draft can't be written, and nothing is; or a rename fails, after others.
    """
    path = Path()
    try:
        with contextlib.ExitStack() as all_written:  # renames them when it is left
            for path, new in contents.items():
                file = all_written.enter_context(replacing(path))
                file.write(new)
                _keep_owner(file, path)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        path = Path(os.fsdecode(error.filename2 or path))
        if error.errno == errno.EBUSY:
            raise MachineError(
                f"{path} is a mount point, which can't be replaced; apply change.diff to the file that is "
                "mounted there"
            ) from error
        raise unwritable(path, error) from error


def _keep_owner(file: BinaryIO, path: Path) -> None:
    """Gives a draft the owner, the permissions and the attributes of the file that it will replace."""
    status = path.stat()
    for owner in (status.st_uid, -1):  # only root may give a file away; its group may stay all the same
        with contextlib.suppress(PermissionError):
            os.fchown(file.fileno(), owner, status.st_gid)
            break
    os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))  # after fchown, which clears bits
    with contextlib.suppress(OSError):  # of a file system without any
        for name in os.listxattr(path):  # an access control list, too, of which the mode shows a part
            with contextlib.suppress(OSError):
                os.setxattr(file.fileno(), name, os.getxattr(path, name))


def _check(path: Path, old: bytes, force: bool) -> None:
    """Raises SpecError where a file isn't to be replaced."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise SpecError(f"{path} is a link or no file, so it isn't replaced; apply the diff yourself")
        if path.read_bytes() != old:
            raise SpecError(f"{path} has changed since it was measured; start `gpurun improve` again")
    except OSError as error:
        raise SpecError(f"can't read {path}: {error.strerror}; start `gpurun improve` again") from None
    if not status.st_mode & WRITABLE:  # to root, a mode forbids nothing
        raise SpecError(f"you may not write {path}; allow it with chmod u+w, or apply the diff elsewhere")
    if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK | os.X_OK)):
        raise SpecError(
            f"you may not write {path}: it or its directory is another user's, read-only or immutable "
            "(lsattr); apply the diff elsewhere"
        )
    if not force and status.st_nlink > 1:
        raise SpecError(
            f"{path} has other names (hard links), which would keep the old text; add --force to write it"
        )
    if not force and (reason := why_untracked(path)):
        raise SpecError(f"{reason}, so nothing could undo the change; add --force to write it")


def with_keys(source: bytes, keys: Mapping[str, Any]) -> bytes:
    """The job file with these values; `None` removes a key.

    Raises:
        NoPlaceError: a change would change more than its key.
    """
    for key, value in keys.items():
        source = _with_key(source, key, value)
    return source


def _with_key(source: bytes, key: str, value: Any) -> bytes:
    """Raises NoPlaceError."""
    text = source.decode()
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:  # libyaml, which reads jobs, takes tabs between a value and its comment
        raise NoPlaceError(str(error)) from None
    if not isinstance(root, yaml.MappingNode):
        raise NoPlaceError("the file holds no keys")
    found = next(((name, node) for name, node in root.value if name.value == key), None)
    if found is None:
        changed = text if value is None else _added(text, root, f"{key}: {flow_text(value)}")
    elif value is None:
        changed = _removed(text, *found)
    else:
        start, end = found[1].start_mark.index, _end(found[1])
        if "#" in text[start:end] and len(NEWLINE.findall(text[start:end])):
            raise NoPlaceError(f"there is a comment in the value of {key}")
        changed = f"{text[:start]}{flow_text(value)}{text[end:]}"
    wanted = {name: old for name, old in _plain(source).items() if name != key}
    wanted |= {} if value is None else {key: value}
    if _plain(changed.encode()) != wanted:
        raise NoPlaceError(f"more than {key} would change")
    return changed.encode()


def _plain(source: bytes) -> dict[str, Any]:
    """Raises NoPlaceError where it can't be read any more."""
    try:
        read = parse_source(source, "")
    except SpecError as error:
        raise NoPlaceError(str(error)) from None
    if read.problems:
        raise NoPlaceError(str(read.problems[0]))
    found: dict[str, Any] = read.root.plain()
    return found


def _end(node: yaml.Node) -> int:
    """The index after the last character of a value; that of a block is after what follows it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[-1] if isinstance(last, tuple) else last)
    index: int = node.end_mark.index
    return index


def _added(text: str, root: yaml.MappingNode, line: str) -> str:
    """With a line after the last key whose value is one word, or with another pair between the braces."""
    if root.flow_style:
        end = root.end_mark.index - 1
        return f"{text[:end].rstrip()}, {line}{text[end:]}"
    plain = [node for _, node in root.value if isinstance(node, yaml.ScalarNode) and node.style is None]
    after = _end(plain[-1] if plain else root)
    ended, newline = NEWLINE.search(text, after), NEWLINE.search(text)
    line = f"{' ' * root.start_mark.column}{line}"
    if ended is None:
        return f"{text}{newline[0] if newline else chr(10)}{line}"
    return f"{text[: ended.end()]}{line}{ended[0]}{text[ended.end() :]}"


def _removed(text: str, name: yaml.Node, value: yaml.Node) -> str:
    """Without the lines of a key and its value."""
    start = name.start_mark.index - name.start_mark.column
    ended = NEWLINE.search(text, _end(value))
    return text[:start] + (text[ended.end() :] if ended else "")
