"""The parts of a Markdown document: links, headings, code and prose, each with its line number.

Covers the Markdown that this repository uses: ATX headings, fenced and indented code, inline links.
Knows no rules.
"""

import re

_FENCE = re.compile(r"^```(\w*)")
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_SPAN = re.compile(r"`([^`]+)`")


def blocks(text):
    """(line, language, code) of each fenced block."""
    begin, language, code = 0, None, []
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if fence and language is None:
            begin, language, code = number, fence[1], []
        elif fence:
            yield begin, language, "".join(code)
            language = None
        elif language is not None:
            code.append(line + "\n")


def _outside_fences(text):
    is_inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if _FENCE.match(line):
            is_inside = not is_inside
        elif not is_inside:
            yield number, line


def _is_indented_code(line):
    return line.startswith("    ") and line.strip()


def prose(text):
    """(line, words) of everything but code and comments."""
    for number, line in _outside_fences(text):
        if not _is_indented_code(line) and not line.startswith("<!--"):
            yield number, _SPAN.sub("`…`", line)


def links(text):
    for number, line in _outside_fences(text):
        yield from ((number, target) for target in _LINK.findall(_SPAN.sub("`…`", line)))


def code_spans(text):
    for number, line in _outside_fences(text):
        if not _is_indented_code(line):
            yield from ((number, span) for span in _SPAN.findall(line))


def block_words(text, language):
    """(line, word) of fenced blocks of a language."""
    for begin, tag, code in blocks(text):
        if tag == language:
            for number, line in enumerate(code.splitlines(), begin + 1):
                yield from ((number, word.rstrip(",")) for word in line.split())


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(text):
    """The anchors that GitHub makes of the headings."""
    seen = {}
    for _, line in _outside_fences(text):
        heading = re.match(r"#+ (.*?)\s*$", line)
        if heading:
            name = anchor(heading[1])
            seen[name] = seen.get(name, -1) + 1
            yield f"{name}-{seen[name]}" if seen[name] else name


def sections(text):
    """(line, title) of the headings of the second level."""
    for number, line in _outside_fences(text):
        if line.startswith("## "):
            yield number, line[3:].strip()


def contents(text):
    """The titles in the list of sections, or none where a document has no such list."""
    entry = re.compile(r"- \[(.*)\]\(#[^)]*\)$")
    return [found[1] for _, line in _outside_fences(text) if (found := entry.match(line))]


def commands(text):
    """(line, words) of each shell command, in blocks marked sh, indented code and code spans."""
    for begin, language, code in blocks(text):
        if language == "sh":
            yield from _split(enumerate(code.splitlines(), begin + 1))
    yield from _split((number, line) for number, line in _outside_fences(text) if _is_indented_code(line))
    spans = code_spans(text)
    yield from _split((number, span) for number, span in spans if re.match(r"(make|flashtune|python3|scripts/\S+) ", span))


def _split(lines):
    for number, line in lines:
        for command in re.split(r"&&|\|\||;|\|", re.sub(r"\s#.*", "", line)):
            words = [word for word in command.split() if not re.match(r"\w+=", word)]
            if words:
                yield number, words


def expand_braces(path):
    """The paths of `a/{b,c}.md`."""
    braces = re.search(r"\{([^{}]*)\}", path)
    if not braces:
        return [path]
    return [one for part in braces[1].split(",") for one in expand_braces(path[: braces.start()] + part + path[braces.end() :])]
