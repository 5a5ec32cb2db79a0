"""The comment lines of source files, each with the number of its line.

A comment line holds nothing but a comment: `//`, `/* */`, Tera's `@* *@`, `#`, or a part of a
Python docstring.
"""

import ast
import re

_LINE = re.compile(r"\s*//")
_BLOCK = {"/*": "*/", "@*": "*@"}


def lines(suffix, text):
    return _of_python(text) if suffix == ".py" else _of_c(text)


def words(line):
    """The text of a comment line without its marks."""
    return re.sub(r"^\s*(?://[/!]*|/\*+|@\*|\*+(?!@)|#+|\"\"\")?\s*", "", line)


def _of_c(text):
    closing = None
    for number, line in enumerate(text.splitlines(), 1):
        if closing:
            yield number, line
            closing = None if closing in line else closing
        elif _LINE.match(line):
            yield number, line
        else:
            opening = line.strip()[:2]
            if opening in _BLOCK:
                yield number, line
                closing = None if _BLOCK[opening] in line.strip()[2:] else _BLOCK[opening]


def _of_python(text):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    inside = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            inside.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    for number, line in enumerate(text.splitlines(), 1):
        if number in inside or line.lstrip().startswith("#"):
            yield number, line
