"""The syntax of programs, which are read without running them."""

import ast
import warnings


def parsed(source: bytes) -> ast.Module:
    """A program's syntax tree, without what Python warns of in it, which the run itself shows.

    Raises:
        SyntaxError: it is no Python of this version; or another error that `ast.parse` raises.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)
