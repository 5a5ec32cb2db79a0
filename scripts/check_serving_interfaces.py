"""Compares the recorded interfaces of vLLM and SGLang with their published sources.

    pip download --no-deps vllm==0.33.0 sglang==0.5.23
    scripts/check_serving_interfaces.py vllm-0.33.0-*.whl sglang-0.5.23-*.whl

Each argument is a wheel, or a folder that holds `vllm/` or `sglang/`. The sources are parsed and
not imported, so neither PyTorch nor a GPU is needed. Exits with 1 if anything differs.
"""

import ast
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bindings" / "python"))

from flashtune.serving import _interface  # noqa: E402


class Sources:
    """The parsed modules of a wheel or a folder."""

    def __init__(self, place):
        self._place = Path(place)
        self._wheel = zipfile.ZipFile(place) if self._place.is_file() else None
        self._parsed = {}

    def has(self, package):
        return self._text(f"{package}/__init__.py") is not None

    def find(self, name):
        """The definition that `module:object.attribute` names, or None."""
        module, _, path = name.partition(":")
        found = self._module(module)
        for part in path.split("."):
            found = found and next((x for x in _body(found) if getattr(x, "name", None) == part), None)
        return found

    def attributes(self, name):
        """The attributes of an instance, those of base classes of the same module included."""
        found = self.find(name)
        if found is None:
            return
        yield from _interface.assigned(found)
        for base in (base.id for base in getattr(found, "bases", ()) if isinstance(base, ast.Name)):
            yield from self.attributes(f"{name.partition(':')[0]}:{base}")

    def _module(self, module):
        if module not in self._parsed:
            text = self._text(module.replace(".", "/") + ".py")
            self._parsed[module] = None if text is None else ast.parse(text)
        return self._parsed[module]

    def _text(self, path):
        if self._wheel is None:
            file = self._place / path
            return file.read_text() if file.is_file() else None
        return self._wheel.read(path).decode() if path in self._wheel.namelist() else None


def _body(node):
    """The definitions directly below a module or a class, those of an `if` included."""
    for child in node.body:
        yield child
        if isinstance(child, (ast.If, ast.Try)):
            yield from _body(child)


def parameters(function):
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    names += [given.vararg.arg] if given.vararg else []
    names += [argument.arg for argument in given.kwonlyargs]
    return [*names, given.kwarg.arg] if given.kwarg else names


def fields(owner):
    for child in owner.body:
        if isinstance(child, ast.AnnAssign):
            yield child.target.id
        elif isinstance(child, ast.Assign):
            yield from (target.id for target in child.targets if isinstance(target, ast.Name))


def differences(engine, sources):
    for name, expected in _interface.FUNCTIONS[engine].items():
        found = sources.find(name)
        if found is None:
            yield f"{name} is missing"
        elif parameters(found) != expected.split():
            yield f"{name} takes ({', '.join(parameters(found))}); recorded is ({', '.join(expected.split())})"
    for name, expected in _interface.FIELDS[engine].items():
        found = sources.find(name)
        missing = set(expected.split()) - set(fields(found) if found else ())
        yield from (f"{name} has no {field}" for field in sorted(missing))
    for name, expected in _interface.ATTRIBUTES[engine].items():
        missing = set(expected.split()) - set(sources.attributes(name))
        yield from (f"{name} has no {attribute}" for attribute in sorted(missing))


def main(places):
    if not places:
        sys.exit(__doc__)
    failed = False
    for place in places:
        sources = Sources(place)
        engines = [engine for engine in _interface.FUNCTIONS if sources.has(engine)]
        if not engines:
            sys.exit(f"{place} holds neither vllm/ nor sglang/")
        for engine in engines:
            found = list(differences(engine, sources))
            for line in found:
                print(f"{engine}: {line}")
            count = sum(len(record[engine]) for record in (_interface.FUNCTIONS, _interface.FIELDS, _interface.ATTRIBUTES))
            print(f"{engine} in {place}: {count} functions and types, {len(found)} differences")
            failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
