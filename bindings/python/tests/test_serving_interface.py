"""What the serving backends do without PyTorch and without the engines: registration, versions,
entry points, and the check of the recorded interface.
"""

import importlib
import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import flashtune
import pytest
from flashtune import FlashtuneError, UnsupportedError
from flashtune.serving import _interface, sglang, vllm

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "check_serving_interfaces.py"
MODULES = {"vllm": vllm, "sglang": sglang}

engines = pytest.mark.parametrize("engine", MODULES)


@engines
def test_an_import_registers_and_imports_nothing(engine):
    program = f"import sys, flashtune; flashtune.serving.{engine}; assert not {{'torch', '{engine}'}} & set(sys.modules)"
    path = str(Path(flashtune.__file__).parents[1])
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": path}, check=True)


@engines
def test_an_engine_that_is_not_installed_is_named(engine, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(FlashtuneError, match=f"{engine} could not be imported"):
        MODULES[engine].register()
    MODULES[engine].plugin()
    assert f"{engine} could not be imported" in caplog.text


@engines
def test_an_engine_with_another_interface_starts_without_the_plugin(engine, monkeypatch, caplog):
    later = types.ModuleType(engine)
    later.__version__ = "9.0.0"
    # Modules of the real engine, which other tests may have imported.
    for name in [name for name in sys.modules if name.startswith(f"{engine}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, engine, later)
    MODULES[engine].plugin()
    assert "no attention backend for" in caplog.text and engine in caplog.text


@engines
def test_an_old_version_is_refused(engine, monkeypatch):
    old = types.ModuleType(engine)
    old.__version__ = "0.5.9"
    monkeypatch.setitem(sys.modules, engine, old)
    first = ".".join(map(str, _interface.FIRST[engine]))
    message = f"this is {engine} 0.5.9; flashtune.serving.{engine} needs {engine} {first} or later"
    with pytest.raises(UnsupportedError) as caught:
        MODULES[engine].register()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "engine, version, is_taken",
    [
        ("vllm", "0.33.0", True), ("vllm", "0.33.1.dev3+g1234567", True), ("vllm", "1.0.0", True), ("vllm", "0.32.9", False),
        ("sglang", "0.5.23.post1", True), ("sglang", "0.6.0", True), ("sglang", "0.5.22.post2", False), ("sglang", "0.5", False),
    ],
)  # fmt: skip
def test_versions_from_the_recorded_one_on_are_taken(engine, version, is_taken):
    if is_taken:
        _interface.expect_version(engine, version)
    else:
        with pytest.raises(UnsupportedError, match="or later"):
            _interface.expect_version(engine, version)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
@pytest.mark.parametrize("group, engine", [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")])
def test_the_entry_points_name_the_plugins(group, engine):
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"][group]["flashtune"].partition(":")
    assert getattr(importlib.import_module(module), function) is MODULES[engine].plugin


def sources_of(engine, folder, leave_out=None):
    """A package whose sources are as recorded, but for one name."""
    files = {f"{engine}/__init__.py": [f"__version__ = '{'.'.join(map(str, _interface.FIRST[engine]))}'"]}
    classes = {}
    for recorded, parameters in _interface.FUNCTIONS[engine].items():
        module, _, path = recorded.partition(":")
        *owner, name = path.split(".")
        arguments = ", ".join(f"**{x}" if x == "kwargs" else x for x in parameters.split())
        line = f"def {name}({arguments}): pass"
        place = classes.setdefault((module, owner[0]), []) if owner else files.setdefault(_file(module), [])
        if recorded != leave_out:
            place.append(line)
    for recorded, names in _interface.FIELDS[engine].items():
        module, _, owner = recorded.partition(":")
        classes.setdefault((module, owner), []).extend(f"{name} = 0" for name in names.split() if recorded != leave_out)
    for recorded, names in _interface.ATTRIBUTES[engine].items():
        module, _, owner = recorded.partition(":")
        stores = "; ".join(f"self.{name} = 0" for name in names.split())
        lines = [f"def __init__(self): {stores}"] if recorded != leave_out else []
        classes.setdefault((module, owner), []).extend(lines)
    for (module, owner), lines in classes.items():
        files.setdefault(_file(module), []).extend([f"class {owner}:", *(f"    {line}" for line in lines or ["pass"])])
    for name, lines in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")


def _file(module):
    return module.replace(".", "/") + ".py"


def run_script(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


@engines
def test_the_script_accepts_sources_as_recorded(engine, tmp_path):
    sources_of(engine, tmp_path)
    done = run_script(tmp_path)
    assert done.returncode == 0 and "0 differences" in done.stdout, done.stdout + done.stderr


@engines
@pytest.mark.parametrize("kind", ["FUNCTIONS", "FIELDS", "ATTRIBUTES"])
def test_the_script_names_what_is_missing(engine, kind, tmp_path):
    recorded = list(getattr(_interface, kind)[engine])[0]
    sources_of(engine, tmp_path, leave_out=recorded)
    done = run_script(tmp_path)
    assert done.returncode == 1 and f"{engine}: {recorded} " in done.stdout, done.stdout + done.stderr


class Config:
    longest: int

    @property
    def shortest(self):
        return 1


class Runner(Config):
    def __init__(self):
        self.pool, other = 1, self
        other.name = 2

    def later(self):
        self.model: int = 3


def test_attributes_are_what_a_class_defines_or_assigns_to_itself():
    found = _interface._attributes(Runner)
    assert {"longest", "shortest", "pool", "model", "later"} <= found and not {"name", "other"} & found


@engines
def test_a_loaded_class_without_a_recorded_attribute_is_refused(engine, monkeypatch):
    recorded = next(iter(_interface.ATTRIBUTES[engine]))
    module, _, name = recorded.partition(":")
    later = types.ModuleType(module)
    setattr(later, name, type(name, (), {}))
    package = types.ModuleType(engine)
    package.__version__ = ".".join(map(str, _interface.FIRST[engine]))
    for loaded in (package, later):
        monkeypatch.setitem(sys.modules, loaded.__name__, loaded)
    for record in ("FUNCTIONS", "FIELDS"):
        monkeypatch.setitem(getattr(_interface, record), engine, {})
    with pytest.raises(UnsupportedError, match=f"{recorded} has no "):
        _interface.check(engine)


def test_the_script_refuses_a_folder_without_an_engine(tmp_path):
    done = run_script(tmp_path)
    assert done.returncode == 1 and "holds neither vllm/ nor sglang/" in done.stderr


@engines
def test_installed_engines_have_the_recorded_interface(engine):
    found = importlib.util.find_spec(engine)
    if found is None:
        pytest.skip(f"{engine} is not installed")
    done = run_script(Path(found.origin).parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
