"""Names of C++ as they stand in the source, from those that compilers and linkers use.

Source: the Itanium C++ ABI, section 5.1; written as `abi::__cxa_demangle` of libstdc++ does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

LONGEST = 20_000
"""Characters of a name and of each of its parts, and types in it: names grow without limit, and traces come
from anyone."""
MOST_KNOWN = 100 * LONGEST
"""Characters of all that a name can refer to again."""
DEEPEST = 60
"""Types within each other, and parts of a path."""
BUILTIN = {
    "v": "void", "w": "wchar_t", "b": "bool", "c": "char", "a": "signed char", "h": "unsigned char",
    "s": "short", "t": "unsigned short", "i": "int", "j": "unsigned int", "l": "long", "m": "unsigned long",
    "x": "long long", "y": "unsigned long long", "n": "__int128", "o": "unsigned __int128", "f": "float",
    "d": "double", "e": "long double", "g": "__float128", "z": "...",
    "Dd": "decimal64", "De": "decimal128", "Df": "decimal32", "Dh": "half", "Di": "char32_t",
    "Ds": "char16_t", "Du": "char8_t", "Da": "auto", "Dc": "decltype(auto)", "Dn": "decltype(nullptr)",
    "DF16b": "std::bfloat16_t", "DF16_": "_Float16", "DF32_": "_Float32", "DF64_": "_Float64",
}  # fmt: skip
BUILTIN_CODES = tuple(sorted(BUILTIN, key=len, reverse=True))
SUFFIXES = {"i": "", "j": "u", "l": "l", "m": "ul", "x": "ll", "y": "ull"}
"""Of literals, by their type."""
STANDARD = {
    "Sa": "std::allocator", "Sb": "std::basic_string", "Ss": "std::string", "Si": "std::istream",
    "So": "std::ostream", "Sd": "std::iostream",
}  # fmt: skip
OPERATORS = {
    "nw": " new", "na": " new[]", "dl": " delete", "da": " delete[]", "ps": "+", "ng": "-", "ad": "&",
    "de": "*", "co": "~", "pl": "+", "mi": "-", "ml": "*", "dv": "/", "rm": "%", "an": "&", "or": "|",
    "eo": "^", "aS": "=", "pL": "+=", "mI": "-=", "mL": "*=", "dV": "/=", "rM": "%=", "aN": "&=", "oR": "|=",
    "eO": "^=", "ls": "<<", "rs": ">>", "lS": "<<=", "rS": ">>=", "eq": "==", "ne": "!=", "lt": "<",
    "gt": ">", "le": "<=", "ge": ">=", "ss": "<=>", "nt": "!", "aa": "&&", "oo": "||", "pp": "++",
    "mm": "--", "cm": ",", "pm": "->*", "pt": "->", "cl": "()", "ix": "[]",
}  # fmt: skip
QUALIFIERS = {"K": " const", "V": " volatile", "r": " restrict"}
_NUMBER = re.compile(r"[0-9]+")
_BASE_36 = re.compile(r"[0-9A-Z]*_")
_CLONE = re.compile(r"\.[A-Za-z_]+(?:\.[0-9]+)*|(?:\.[0-9]+)+")


class UnknownNameError(ValueError):
    """The grammar that is read here doesn't have this name."""


@dataclass(frozen=True)
class CppType:
    """A type as it is written around the name that has it: `void (*` and `)(int)`."""

    before: str
    after: str = ""
    kind: Literal["", "function", "array"] = ""
    """A pointer to what isn't empty takes parentheses."""

    def __post_init__(self) -> None:
        if len(self.before) + len(self.after) > LONGEST:
            raise UnknownNameError

    def __str__(self) -> str:
        return f"{self.before}{' ' * (self.kind == 'function')}{self.after}"

    def pointer(self, sign: str) -> CppType:
        """A pointer or a reference to it."""
        if self.kind:
            return CppType(f"{self.before} ({sign}", f"){self.after}")
        if sign == "*" or not self.before.endswith("&"):
            return replace(self, before=self.before + sign)
        of_both = "&" if sign == "&" or not self.before.endswith("&&") else "&&"  # a reference to a reference
        return replace(self, before=self.before.rstrip("&") + of_both)

    def with_qualifiers(self, texts: Sequence[str]) -> CppType:
        """It with those that it doesn't have."""
        if self.kind == "function":
            return replace(self, after="".join((self.after, *texts)))
        return replace(self, before="".join((self.before, *(each for each in texts if not self.has(each)))))

    def has(self, qualifier: str) -> bool:
        """Whether it ends with this qualifier, before others."""
        words = self.before
        while found := next((each for each in QUALIFIERS.values() if words.endswith(each)), None):
            if found == qualifier:
                return True
            words = words.removesuffix(found)
        return False


@lru_cache(512)
def demangled(name: str) -> str:
    """The name in C++; as it is where it isn't a mangled one, or has what isn't read here.

    `_ZN2at6native3addIfEEvi` is `void at::native::add<float>(int)`.
    """
    if not name.startswith("_Z") or len(name) > LONGEST:
        return name
    try:
        reader = _Reader(name, 2)
        text = reader.encoding()
        clones = _CLONE.findall(name, reader.place)
        if "".join(clones) != name[reader.place :]:
            return name
        text += "".join(f" [clone {each}]" for each in clones)
    except (UnknownNameError, RecursionError):
        return name
    return text if len(text) <= LONGEST else name


def joined(texts: Sequence[str]) -> str:
    """`int, float`."""
    if sum(map(len, texts)) > LONGEST:
        raise UnknownNameError
    return ", ".join(texts)


def with_arguments(path: str, arguments: str) -> str:
    """A template with its arguments: `operator<< <int>`."""
    return f"{path}{' ' * path.endswith('<')}{arguments}"


@dataclass
class _Name:
    """A name, and what the type of a function of this name begins with."""

    text: str
    has_result: bool = False
    """Whether the type has a result: that of a template that is no constructor and no conversion."""
    qualifiers: str = ""


@dataclass(frozen=True)
class _Known:
    """What a name can refer to again."""

    type: CppType
    begin: int = 0
    """Where it begins, if it is read again for other arguments of a template; 0: it can't be."""
    num_known: int = 0
    """What was known there."""
    arguments: Sequence[object] | None = None
    """Those that it depends on."""


@dataclass
class _Reader:
    name: str
    place: int
    known: list[_Known] = field(default_factory=list)
    num_known: int = 0
    """The characters of all that is known."""
    num_types: int = 0
    num_parameters: int = 0
    """How many parameters of templates were read."""
    arguments: list[CppType | list[CppType]] = field(default_factory=list)
    """Those of the innermost template that the function's name has; a list is a pack."""
    of_pack: int | None = None
    """The element that is meant of packs in an expansion."""
    longest_pack: int = 0
    depth: int = 0

    @property
    def is_at_end(self) -> bool:
        return self.place >= len(self.name)

    def next_is(self, *texts: str) -> bool:
        return self.name.startswith(texts, self.place)

    def take(self, *texts: str) -> str:
        """The one of these that comes next; empty if none does."""
        found = next((text for text in texts if self.name.startswith(text, self.place)), "")
        self.place += len(found)
        return found

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise UnknownNameError

    def number(self) -> int:
        found = _NUMBER.match(self.name, self.place)
        if found is None or len(found[0]) > 9:
            raise UnknownNameError
        self.place = found.end()
        return int(found[0])

    def encoding(self, shows_result: bool = True) -> str:
        """A function with its parameters, or an object."""
        name = self.full_name(is_function=True)
        text = name.text
        if not self.is_at_end and not self.next_is("E", "."):
            result = self.type() if name.has_result else None
            text += self.parameters() + name.qualifiers
            if result is not None and shows_result:
                text = f"{result.before}{' ' * (not result.after)}{text}{result.after}"
        return text

    def parameters(self) -> str:
        types = list[str]()
        while not self.is_at_end and not self.next_is("E", ".", "RE", "OE"):  # its own reference qualifier
            if text := str(self.type()):  # empty: a pack without elements
                types.append(text)
        return f"({joined(types if types != ['void'] else [])})"

    def full_name(self, is_function: bool = False) -> _Name:
        if self.take("N"):
            return self.nested_name(is_function)
        if self.take("Z"):
            outer, self.arguments = self.arguments, []
            name = self.local_name()
            self.arguments = self.arguments if is_function else outer
            return name
        is_known = self.next_is("S") and not self.next_is("St")
        name = _Name(str(self.substitution()) if is_known else self.unscoped_name())
        if self.next_is("I"):
            if not is_known:
                self.know(CppType(name.text))
            name = _Name(with_arguments(name.text, self.template_arguments(is_function)), has_result=True)
        elif is_known:
            raise UnknownNameError
        return name

    def unscoped_name(self) -> str:
        return "std::" * bool(self.take("St")) + self.unqualified_name("")

    def nested_name(self, is_function: bool) -> _Name:
        qualifiers = "".join(self.qualifiers())
        qualifiers += {"R": " &", "O": " &&", "": ""}[self.take("R", "O")]
        path, last, num_parts = "", "", 0
        is_template, has_result, depends = False, True, False
        while not self.take("E"):
            num_parts += 1
            if num_parts > DEEPEST:
                raise UnknownNameError
            if self.next_is("S"):
                if path:
                    raise UnknownNameError
                is_short = self.next_is(*STANDARD)  # for more than it is written as
                path = "std" if self.take("St") else str(self.substitution())
                last = "" if is_short else path.split("<")[0].rpartition("::")[2]
                continue
            num_parameters = self.num_parameters
            if self.next_is("I"):
                path, is_template = with_arguments(path, self.template_arguments(is_function)), True
            elif self.next_is("T"):
                path, is_template = str(self.template_parameter()), False
                last = path
            elif self.next_is("Dt", "DT"):
                raise UnknownNameError
            else:
                has_result = not self.next_is("C", "D", "cv")  # constructors, destructors, conversions
                part = self.unqualified_name(last)
                path, last, is_template = f"{path}::{part}" if path else part, part, False
            self.know(CppType(path), depends=self.num_parameters > num_parameters or depends)
            depends = self.known[-1].arguments is not None
        if not path or not self.known:
            raise UnknownNameError
        self.known.pop()
        return _Name(path, is_template and has_result, qualifiers)

    def local_name(self) -> _Name:
        scope = self.encoding(shows_result=False)
        self.expect("E")
        if self.take("s"):
            self.discriminator()
            return _Name(f"{scope}::string literal")
        if self.take("d"):
            if not self.next_is("_"):
                self.number()
            self.expect("_")
        inner = self.full_name(is_function=True)
        self.discriminator()
        return replace(inner, text=f"{scope}::{inner.text}")

    def discriminator(self) -> None:
        if self.take("__"):
            self.number()
            self.expect("_")
        elif self.take("_"):
            self.number()

    def unqualified_name(self, last: str) -> str:
        """A part of a path.

        Args:
            last: the one before it, after which constructors are named.
        """
        if _NUMBER.match(self.name, self.place):
            text = self.source_name()
        elif self.take("Ut"):
            text = f"{{unnamed type#{self.sequence()}}}"
        elif self.take("Ul"):
            text = self.closure()
        elif found := self.take("C1", "C2", "C3", "C4", "C5", "D0", "D1", "D2", "D4", "D5"):
            if not last:
                raise UnknownNameError
            text = last if found[0] == "C" else f"~{last}"
        elif self.take("cv"):
            text = f"operator {self.type()}"
        elif self.take("li"):
            text = f'operator"" {self.source_name()}'
        elif found := self.take(*OPERATORS):
            text = f"operator{OPERATORS[found]}"
        else:
            raise UnknownNameError
        while self.take("B"):
            text += f"[abi:{self.source_name()}]"
        return text

    def source_name(self) -> str:
        length = self.number()
        text = self.name[self.place : self.place + length]
        if len(text) < length or not length:
            raise UnknownNameError
        self.place += length
        return "(anonymous namespace)" if text.startswith("_GLOBAL__N") else text

    def closure(self) -> str:
        outer, self.arguments = self.arguments, []
        parameters = self.parameters()
        self.expect("E")
        self.arguments = outer
        return f"{{lambda{parameters}#{self.sequence()}}}"

    def sequence(self) -> int:
        """The number of a closure or an unnamed type, from 1 on."""
        number = 1 if self.next_is("_") else self.number() + 2
        self.expect("_")
        return number

    def know(self, found: CppType, begin: int = 0, num_known: int = 0, depends: bool = False) -> CppType:
        self.known.append(_Known(found, begin, num_known, self.arguments if depends else None))
        self.num_known += len(found.before) + len(found.after)
        if self.num_known > MOST_KNOWN:
            raise UnknownNameError
        return found

    def substitution(self) -> CppType:
        for short, text in STANDARD.items():
            if self.take(short):
                return CppType(text)
        self.expect("S")
        found = self.known[self.reference(len(self.known))]
        if found.arguments is None or found.arguments is self.arguments:
            return found.type
        if not found.begin:
            raise UnknownNameError
        place, known = self.place, self.known
        self.place, self.known = found.begin, known[: found.num_known]
        again = self.new_type()
        self.place, self.known = place, known
        return again

    def reference(self, num: int) -> int:
        """The place, of so many, that a number of base 36 means."""
        found = _BASE_36.match(self.name, self.place)
        if found is None or len(found[0]) > 6:
            raise UnknownNameError
        self.place = found.end()
        place = int(found[0][:-1], 36) + 1 if len(found[0]) > 1 else 0
        if place >= num:
            raise UnknownNameError
        return place

    def template_parameter(self) -> CppType:
        self.expect("T")
        self.num_parameters += 1
        if not self.arguments:  # that of a generic closure
            return CppType(f"auto:{self.reference(DEEPEST) + 1}")
        found = self.arguments[self.reference(len(self.arguments))]
        if isinstance(found, CppType):
            return found
        self.longest_pack = max(self.longest_pack, len(found))
        if self.of_pack is None:
            return CppType(joined([*map(str, found)]))
        return found[self.of_pack] if self.of_pack < len(found) else CppType("")

    def template_arguments(self, is_function: bool) -> str:
        """`<int, 4>`; those of a function's name are what `T_` means."""
        self.expect("I")
        found = list[CppType | list[CppType]]()
        if is_function:
            self.arguments = found
        while not self.take("E"):
            if self.take("J"):
                pack = list[CppType]()
                while not self.take("E"):
                    pack.append(self.template_argument())
                found.append(pack)
            else:
                found.append(self.template_argument())
        texts = [str(each) for some in found for each in (some if isinstance(some, list) else [some])]
        inner = joined([text for text in texts if text])
        return f"<{inner}{' ' * inner.endswith('>')}>"

    def template_argument(self) -> CppType:
        if self.take("L"):
            return self.literal()
        if not self.take("X"):
            return self.type()
        found = self.literal() if self.take("L") else self.template_parameter()
        self.expect("E")
        return found

    def literal(self) -> CppType:
        if self.take("_Z"):
            outer, self.arguments = self.arguments, []
            text = f"&({self.encoding()})"
            self.arguments = outer
            self.expect("E")
            return CppType(text)
        kind = self.name[self.place : self.place + 1]
        type_text = str(self.type())
        end = self.name.find("E", self.place)
        if end < 0:
            raise UnknownNameError
        value, self.place = self.name[self.place : end], end + 1
        value = f"-{value[1:]}" if value.startswith("n") else value
        if kind == "b" and value in ("0", "1"):
            return CppType(("false", "true")[int(value)])
        if kind in SUFFIXES:
            return CppType(value + SUFFIXES[kind])
        return CppType(f"({type_text})[{value}]" if kind in "fde" else f"({type_text}){value}")

    def qualifiers(self) -> list[str]:
        taken = {*iter(lambda: self.take(*QUALIFIERS), "")}
        return [text for sign, text in QUALIFIERS.items() if sign in taken]

    def type(self) -> CppType:
        self.depth, self.num_types = self.depth + 1, self.num_types + 1
        if self.depth > DEEPEST or self.num_types > LONGEST:
            raise UnknownNameError
        try:
            return self.any_type()
        finally:
            self.depth -= 1

    def any_type(self) -> CppType:
        if builtin := self.take(*BUILTIN_CODES):
            return CppType(BUILTIN[builtin])
        if self.take("Dp"):
            return self.expansion()
        if self.next_is("S") and not self.next_is("St"):
            found_type = self.substitution()
            if not self.next_is("I"):
                return found_type
            return self.know(CppType(f"{found_type}{self.template_arguments(False)}"))
        begin, num_known, num_parameters = self.place, len(self.known), self.num_parameters
        found = self.new_type()
        return self.know(found, begin, num_known, self.num_parameters > num_parameters)

    def new_type(self) -> CppType:
        """A type that the name can refer to again."""
        if self.next_is("r", "V", "K"):
            qualifiers = self.qualifiers()
            return self.type().with_qualifiers(qualifiers)
        if sign := self.take("P", "R", "O"):
            return self.type().pointer({"P": "*", "R": "&", "O": "&&"}[sign])
        if self.take("F"):
            self.take("Y")
            result, parameters = self.type(), self.parameters()
            reference = {"R": " &", "O": " &&", "": ""}[self.take("R", "O")]
            self.expect("E")
            return CppType(result.before, f"{parameters}{reference}{result.after}", "function")
        if self.take("A"):
            length = "" if self.next_is("_") else str(self.number())
            self.expect("_")
            of = self.type()
            return CppType(of.before, f" [{length}]{of.after.lstrip()}", "array")
        if self.take("M"):
            owner, member = self.type(), self.type()
            if member.kind:
                return CppType(f"{member.before} ({owner}::*", f"){member.after}")
            return CppType(f"{member.before} {owner}::*", member.after)
        if self.next_is("T"):
            found = self.template_parameter()
            if self.next_is("I"):
                self.know(found)
                found = CppType(f"{found}{self.template_arguments(False)}")
            return found
        if self.take("u"):
            return CppType(self.source_name())
        return CppType(self.full_name().text)

    def expansion(self) -> CppType:
        """A pack, whose pattern is read again for each of its elements."""
        begin, num_known = self.place, len(self.known)
        outer, self.longest_pack, self.of_pack = (self.longest_pack, self.of_pack), 0, 0
        texts = [str(self.type())]
        num, known = self.longest_pack, self.known[num_known:]
        for element in range(1, num):
            self.place, self.of_pack = begin, element
            del self.known[num_known:]
            texts.append(str(self.type()))
        self.known[num_known:] = known
        self.longest_pack, self.of_pack = outer
        return self.know(CppType(joined(texts[:num])))
