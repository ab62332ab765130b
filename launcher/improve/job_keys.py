"""Keys at the top of a job file get other values: the changed bytes; all else stays byte for byte."""

from collections.abc import Mapping
from typing import Any

import yaml

from gpurun.launcher.errors import SpecError
from gpurun.launcher.improve.rewrite import NEWLINE, NoPlaceError
from gpurun.launcher.jobfile.yaml.describe import flow_text
from gpurun.launcher.jobfile.yaml.tree import parse_source


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
    root = yaml.compose(text, Loader=yaml.SafeLoader)
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
