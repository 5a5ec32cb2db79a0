#!/usr/bin/env python3
"""Checks what a program can check of the documents and comments: `ok: …`, or FAILED with the places.

    python3 scripts/check_prose.py [--only NAME] [--skip NAME]

The checks are: README's length, relative links, anchors and lists of sections in Markdown, paths
and commands that Markdown names, C and Python examples in Markdown, documents that comments name,
and the width and some phrases of comments. Whether a sentence reads well is for a person to judge.
`scripts/test.py --ci` runs this script after the build, since examples need the library.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from prose import comments, markdown  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (".rs", ".cuh", ".cu", ".tera", ".py", ".h", ".c", ".hpp", ".cpp")
WIDTH = 100
README_LINES, README_WORDS = 140, 1300
# Openers that hide the subject of a sentence, and words that the field does not use.
PHRASES = re.compile(r"\b(Of|What is|But for) |\bsequences of their own lengths|\bblocks? of threads", re.MULTILINE)
LIBRARY = {"darwin": "libflashtune.dylib"}.get(sys.platform, "libflashtune.so")
EXAMPLE_SECONDS = 120


class Repository:
    """A tree of files, what its examples need, and the lines that say what was skipped."""

    def __init__(self, root, library=None, command=None):
        self.root, self.library, self.command = Path(root), library, command
        self.skipped = []

    def files(self, *suffixes):
        """The files under version control, or all files of a tree that has none."""
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=self.root, capture_output=True, text=True,
        )  # fmt: skip
        if listed.returncode == 0:
            paths = [self.root / line for line in listed.stdout.splitlines()]
        else:
            paths = [path for path in self.root.rglob("*") if path.is_file()]
        return sorted(path for path in paths if path.suffix in suffixes and path.is_file())

    def documents(self):
        return [(path, path.read_text()) for path in self.files(".md")]

    def place(self, path, line):
        return f"{path.relative_to(self.root)}:{line}"


def readme_length(repository):
    readme = repository.root / "README.md"
    text = readme.read_text()
    for what, found, limit in (
        ("lines", len(text.splitlines()), README_LINES),
        ("words", len(text.split()), README_WORDS),
    ):
        if found > limit:
            yield f"{repository.place(readme, 1)}: {found} {what}, at most {limit}"


def links(repository):
    """Relative links and anchors of Markdown lead somewhere."""
    for path, text in repository.documents():
        for line, target in markdown.links(text):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            found = (path.parent / file).resolve() if file else path
            if not found.exists():
                yield f"{repository.place(path, line)}: {target} is no file"
            elif anchor and anchor not in markdown.anchors(found.read_text()):
                yield f"{repository.place(path, line)}: {target} is no heading"


def contents(repository):
    """A list of a document's sections names all of them."""
    for path, text in repository.documents():
        listed = markdown.contents(text)
        for line, title in markdown.sections(text) if listed else ():
            if title not in listed:
                yield f"{repository.place(path, line)}: the list of sections lacks {title}"


def paths(repository):
    """Paths in code spans and text blocks exist. Spans with <…> or … are skipped."""
    top = "|".join(re.escape(entry.name) for entry in repository.root.iterdir() if entry.is_dir() and entry.name[0] != ".")
    pattern = re.compile(rf"(?:{top or 'src'})/[\w./*{{}},-]*")
    ignored = re.compile(r"(target|build)/")
    for path, text in repository.documents():
        for line, span in [*markdown.code_spans(text), *markdown.block_words(text, "text")]:
            if not pattern.fullmatch(span) or ignored.match(span):
                continue
            if not all(any(repository.root.glob(one.rstrip("/"))) for one in markdown.expand_braces(span)):
                yield f"{repository.place(path, line)}: {span} is no file"


def commands(repository):
    """Commands in Markdown name targets, subcommands, options and scripts that exist."""
    makefile = repository.root / "Makefile"
    targets = set(re.findall(r"^([\w-]+):", makefile.read_text(), re.MULTILINE)) if makefile.is_file() else set()
    if not repository.command:
        repository.skipped.append("commands of flashtune: target/debug/flashtune is not built")
    for path, text in repository.documents():
        for line, words in markdown.commands(text):
            program, *arguments = words
            wrong = None
            if program == "make":
                named = [word for word in arguments if re.fullmatch(r"[a-z][\w-]*", word)]
                wrong = next((f"make {target}" for target in named if target not in targets), None)
            elif Path(program).name == "flashtune" and repository.command:
                wrong = unknown_option(repository.command, arguments)
            elif program == "python3" and arguments and arguments[0].endswith(".py"):
                wrong = unknown_to_script(repository.root, arguments)
            elif program.startswith("scripts/"):
                wrong = unknown_to_script(repository.root, words)
            if wrong:
                yield f"{repository.place(path, line)}: {wrong} does not exist"


def unknown_to_script(root, words):
    """The script if it is missing, or the first long option that its folder does not have."""
    script = root / words[0]
    if not script.is_file():
        return words[0]
    texts = [path.read_text() for path in script.parent.glob("*.py")] + [script.read_text()]
    own = words[1 : words.index("--")] if "--" in words else words[1:]  # behind it is another command
    options = (re.match(r"--[\w-]+", word) for word in own)
    # A string in Python, a pattern of `case` in a shell script.
    names = lambda option: (f'"{option}"', f"{option})")
    missing = (option[0] for option in options if option and not any(n in text for text in texts for n in names(option[0])))
    return next((f"{words[0]} {option}" for option in missing if option != "--help"), None)


def unknown_option(command, arguments):
    """The first subcommand or long option that the command line does not have, or None."""
    known = ()
    for word in arguments:
        if "\nCommands:\n" not in help_of(command, known) or word.startswith("-"):
            break
        if not re.search(rf"^  {re.escape(word)}  ", help_of(command, known), re.MULTILINE):
            return " ".join(("flashtune", *known, word))
        known += (word,)
    for word in arguments[len(known) :]:
        option = re.match(r"--[\w-]+", word)
        if option and not re.search(rf"{option[0]}\b", help_of(command, known)):
            return " ".join(("flashtune", *known, option[0]))
    return None


@cache
def help_of(command, subcommands):
    done = subprocess.run([command, *subcommands, "--help"], capture_output=True, text=True)
    return done.stdout


# A C++ program may use the header as a C program does.
AS_CPP = ["c++", "-x", "c++", "-std=c++17", "-Wall", "-Werror", "-fsyntax-only"]


def c_examples(repository):
    """Programs compile without a warning and run on the CPU backend; fragments compile. README's
    are C++ too."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if not compiler:
        return repository.skipped.append("C examples: no C compiler")
    if not repository.library:
        repository.skipped.append("running the C examples: the library is not built")
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "example.c", Path(folder) / "example"
        flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-I", repository.root / "include"]
        for path, line, text in examples(repository, "c"):
            is_program = re.search(r"\bint main\(", text)
            source.write_text(text if is_program else f"#include <flashtune.h>\n{text}")
            can_run = is_program and repository.library
            output = [repository.library, "-lm", "-o", program] if can_run else ["-fsyntax-only"]
            failed = failure([compiler, *flags, source, *output], folder, repository)
            failed = failed or (can_run and failure([program], folder, repository))
            if not failed and path.name == "README.md" and shutil.which("c++"):
                failed = failure([*AS_CPP, "-I", repository.root / "include", source], folder, repository)
            if failed:
                yield f"{repository.place(path, line)}: {failed}"


def python_examples(repository):
    """Programs run on the CPU backend; those that need torch, transformers or JAX run where they are
    installed."""
    if not repository.library:
        return repository.skipped.append("Python examples: the library is not built")
    missing = [name for name in ("torch", "transformers", "jax") if importlib.util.find_spec(name) is None]
    with tempfile.TemporaryDirectory() as folder:
        for path, line, text in examples(repository, "python"):
            needed = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
            if lacking := needed.intersection(missing):
                repository.skipped.append(f"{repository.place(path, line)}: no {min(lacking)}")
                text = f"compile({text!r}, 'example', 'exec')"
            failed = failure([sys.executable, "-c", text], folder, repository)
            if failed:
                yield f"{repository.place(path, line)}: {failed}"


def examples(repository, language):
    for path, text in repository.documents():
        for line, tag, block in markdown.blocks(text):
            if tag == language:
                yield path, line, block


def failure(command, folder, repository):
    """The last lines of a command that fails, in an environment of its own."""
    environment = {**os.environ, "HOME": folder, "FLASHTUNE_CACHE_DIR": str(Path(folder) / "cache")}
    environment["PYTHONPATH"] = str(repository.root / "bindings" / "python")
    if repository.library:
        environment["FLASHTUNE_LIBRARY"] = str(repository.library)
        environment["LD_LIBRARY_PATH"] = str(repository.library.parent)
    command = [str(word) for word in command]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, timeout=EXAMPLE_SECONDS, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"still running after {EXAMPLE_SECONDS} s"
    return "\n    ".join(["fails", *done.stdout.splitlines()[-8:]]) if done.returncode else None


def public_functions(repository):
    """The C guide's function index has every function of the header."""
    header, guide = repository.root / "include" / "flashtune.h", repository.root / "docs" / "c-guide.md"
    declared = re.findall(r"^[\w ]+\**\s*\**(flashtune_\w+)\(", header.read_text(), re.MULTILINE)
    # Sections before the index name functions too.
    index = guide.read_text().rpartition("## Function index")[2]
    indexed = {span for _, span in markdown.code_spans(index)}
    for name in declared:
        if name not in indexed:
            yield f"{repository.place(guide, 1)}: {name} is not in the function index"


def document_phrases(repository):
    for path, text in repository.documents():
        for line, words in markdown.prose(text):
            for found in PHRASES.finditer(words):
                yield f"{repository.place(path, line)}: {found[0].strip()!r}"


def comment_references(repository):
    """Documents that comments name exist, and so do headings of the form (DESIGN.md, Lookup)."""
    pattern = re.compile(r"\b([\w/-]+\.md)(?:, ([^()]*)\))?")
    for path, line, text in source_comments(repository):
        for name, heading in pattern.findall(text):
            found = repository.root / name
            if not found.is_file():
                yield f"{repository.place(path, line)}: {name} is no file"
            elif heading and markdown.anchor(heading) not in markdown.anchors(found.read_text()):
                yield f"{repository.place(path, line)}: {name} has no heading {heading!r}"


def comment_phrases(repository):
    for path, line, text in source_comments(repository):
        for found in PHRASES.finditer(comments.words(text)):
            yield f"{repository.place(path, line)}: {found[0].strip()!r}"


def comment_width(repository):
    for path, line, text in source_comments(repository):
        if len(text) > WIDTH:
            yield f"{repository.place(path, line)}: {len(text)} columns, at most {WIDTH}"


def source_comments(repository):
    own = {repository.root / "scripts" / name for name in ("check_prose.py", "test_check_prose.py")}
    for path in repository.files(*SOURCES):
        if path not in own:
            yield from ((path, line, text) for line, text in comments.lines(path.suffix, path.read_text()))


CHECKS = {
    "README's length": readme_length,
    "links": links,
    "lists of sections": contents,
    "paths": paths,
    "commands": commands,
    "C examples": c_examples,
    "Python examples": python_examples,
    "public functions": public_functions,
    "phrases of documents": document_phrases,
    "references of comments": comment_references,
    "phrases of comments": comment_phrases,
    "width of comments": comment_width,
}


def built(folder, name):
    path = Path(folder) / name
    return path.resolve() if path.is_file() else None


def report(repository, names):
    """Prints a line for each check and the places below it; returns whether one failed."""
    has_failed = False
    for name in names:
        repository.skipped.clear()
        places = list(CHECKS[name](repository) or ())
        has_failed |= bool(places)
        print(f"FAILED: {name}, {len(places)} places" if places else f"ok: {name}")
        for line in [*places, *(f"SKIPPED: {line}" for line in repository.skipped)]:
            print(f"  {line}")
    return has_failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=CHECKS, metavar="NAME", help=f"one of: {', '.join(CHECKS)}")
    parser.add_argument("--skip", action="append", choices=CHECKS, metavar="NAME", default=[], help="the same names")
    arguments = parser.parse_args()
    debug = ROOT / "target" / "debug"
    library = Path(os.environ["FLASHTUNE_LIBRARY"]) if "FLASHTUNE_LIBRARY" in os.environ else built(debug, LIBRARY)
    repository = Repository(ROOT, library, built(debug, "flashtune"))
    names = [name for name in arguments.only or CHECKS if name not in arguments.skip]
    sys.exit(report(repository, names))


if __name__ == "__main__":
    main()
