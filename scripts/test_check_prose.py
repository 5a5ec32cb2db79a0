#!/usr/bin/env python3
"""Each check of check_prose.py finds what is wrong and passes what is right, in small trees."""

import contextlib
import tempfile
import unittest
from pathlib import Path

import check_prose


class Tree(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def found(self, check, **repository):
        return list(check(check_prose.Repository(self.root, **repository)) or ())

    def test_a_long_readme_is_found(self):
        self.write("README.md", "word " * check_prose.README_WORDS + "\n")
        self.assertEqual(self.found(check_prose.readme_length), [])
        self.write("README.md", "word " * check_prose.README_WORDS + "\n" * check_prose.README_LINES + "word")
        lines, words = self.found(check_prose.readme_length)
        self.assertIn("lines", lines)
        self.assertIn("words", words)

    def test_dead_links_and_anchors_are_found(self):
        self.write("docs/b.md", "# One `two`: three\n\n# Same\n\n# Same\n")
        self.write("a.md", "[x](docs/b.md#one-two-three) [y](docs/b.md#same-1) [z](https://example.org) ![w](docs/b.md)\n")
        self.assertEqual(self.found(check_prose.links), [])
        self.write("a.md", "line\n[x](docs/c.md)\n[y](docs/b.md#two)\n```\n[z](nowhere.md)\n```\n")
        self.assertEqual([place.split()[0] for place in self.found(check_prose.links)], ["a.md:2:", "a.md:3:"])

    def test_sections_that_a_list_lacks_are_found(self):
        self.write("a.md", "## One\n\n- [x](#one), which is no list\n\n## Two\n")
        self.write("b.md", "- [One](#one)\n- [K/V `two`](#kv-two)\n\n## One\n\n## K/V `two`\n\n```\n## Three\n```\n")
        self.assertEqual(self.found(check_prose.contents), [])
        self.write("b.md", "- [One](#one)\n\n## One\n\n## Two\n")
        (place,) = self.found(check_prose.contents)
        self.assertIn("b.md:5", place)

    def test_paths_that_are_no_files_are_found(self):
        self.write("src/plan/key.rs", "")
        self.write("a.md", "`src/plan/key.rs` `src/{plan}/` `src/*/key.rs` `src/<arch>/x` `target/debug/x`\n")
        self.assertEqual(self.found(check_prose.paths), [])
        self.write("a.md", "`src/plan/keys.rs`\n`src/{plan,tune}/`\n```text\nsrc/tune/ tunes\n```\n")
        self.assertEqual(len(self.found(check_prose.paths)), 3)

    def test_commands_that_do_not_exist_are_found(self):
        self.write("Makefile", "lib:\n\ttrue\n")
        self.write("scripts/there.py", "")
        self.write("a.md", "    make lib && X=1 python3 scripts/there.py\n")
        self.assertEqual(self.found(check_prose.commands), [])
        self.write("a.md", "    make libs # comment\n\nUse `python3 scripts/gone.py --x`.\n\n```sh\nscripts/gone.sh\n```\n")
        self.assertEqual(len(self.found(check_prose.commands)), 3)

    def test_subcommands_and_options_that_do_not_exist_are_found(self):
        self.write("help.sh", "#!/bin/sh\ncase $1 in sub) echo '  --yes  x';; *) printf '\\nCommands:\\n  sub  x\\n';; esac\n")
        program = self.root / "help.sh"
        program.chmod(0o755)
        self.write("a.md", "`flashtune sub --yes`\n")
        self.assertEqual(self.found(check_prose.commands, command=program), [])
        self.write("a.md", "`flashtune bus --yes`\n\n    build/flashtune sub --no 1\n")
        self.assertEqual(len(self.found(check_prose.commands, command=program)), 2)

    def test_examples_that_do_not_compile_are_found(self):
        self.write("include/flashtune.h", "int flashtune_version(void);\n")
        self.write("a.md", "```c\nstatic int f(void) { return flashtune_version(); }\n```\n")
        self.assertEqual(self.found(check_prose.c_examples), [])
        self.write("a.md", "```c\nstatic int f(void) { return flashtune_versions(); }\n```\n")
        self.assertEqual(len(self.found(check_prose.c_examples)), 1)

    def test_examples_that_fail_are_found(self):
        self.write("a.md", "```python\nassert 1 == 1\n```\n\n```python\nassert 1 == 2\n```\n")
        (place,) = self.found(check_prose.python_examples, library=self.root / "any")
        self.assertIn("a.md:5", place)
        self.assertIn("AssertionError", place)

    def test_functions_that_the_guide_leaves_out_are_found(self):
        self.write("include/flashtune.h", "int32_t flashtune_a(int x);\nconst char *flashtune_b(void);\n")
        self.write("docs/c-guide.md", "See `flashtune_b`.\n\n## Function index\n\n| `flashtune_a` | x |\n")
        (place,) = self.found(check_prose.public_functions)
        self.assertIn("flashtune_b", place)

    def test_options_that_a_script_does_not_have_are_found(self):
        self.write("bench/a.py", "from loop import parser\n")
        self.write("bench/loop.py", 'parser.add_argument("--suites")\n')
        self.write("a.md", "`python3 bench/a.py --suites x`\n")
        self.assertEqual(self.found(check_prose.commands), [])
        self.write("a.md", "`python3 bench/a.py --suite x`\n")
        self.assertEqual(len(self.found(check_prose.commands)), 1)

    def test_documents_that_comments_name_in_vain_are_found(self):
        self.write("DESIGN.md", "## The error rule\n")
        self.write("a.rs", "// See (DESIGN.md, The error rule), or DESIGN.md, which says it.\n")
        self.assertEqual(self.found(check_prose.comment_references), [])
        self.write("a.rs", "// See (DESIGN.md, tuning log).\n// See docs/gone.md.\n")
        self.assertEqual(len(self.found(check_prose.comment_references)), 2)

    def test_phrases_are_found_in_prose_and_comments_alone(self):
        self.write("a.md", "One of `Of ` them.\n\n    Of code\n")
        self.write("a.rs", 'let x = "Of text"; // of it\n')
        self.assertEqual(self.found(check_prose.document_phrases) + self.found(check_prose.comment_phrases), [])
        self.write("a.md", "Of these one. What is left.\nA block of threads.\n")
        self.assertEqual(len(self.found(check_prose.document_phrases)), 3)
        for path, text in {
            "a.rs": "/// But for one.\n",
            "a.h": "/*\n * Of it.\n */\n",
            "a.tera": "@* sequences of their own lengths *@\n",
            "a.py": 'def f():\n    """What is it?"""\n',
        }.items():
            with self.subTest(path):
                self.write(path, text)
                self.assertEqual(len(self.found(check_prose.comment_phrases)), 1)
                (self.root / path).unlink()

    def test_wide_comments_are_found_and_wide_code_is_not(self):
        wide = "x" * check_prose.WIDTH
        self.write("a.rs", f'let x = "{wide}";\n')
        self.write("a.py", f'x = "{wide}"  # code\n')
        self.assertEqual(self.found(check_prose.comment_width), [])
        self.write("a.rs", f"    //! {wide}\n")
        self.write("a.py", f'"""x\n\n{wide}x\n"""\n# {wide}\n')
        self.assertEqual(len(self.found(check_prose.comment_width)), 3)

    def test_what_is_wrong_fails_and_is_named(self):
        self.write("README.md", "Of these.\n")
        output = self.root / "output"
        with output.open("w") as stream, contextlib.redirect_stdout(stream):
            repository = check_prose.Repository(self.root)
            self.assertTrue(check_prose.report(repository, ["phrases of documents", "links"]))
            self.assertFalse(check_prose.report(repository, ["links"]))
        self.assertIn("FAILED: phrases of documents, 1 places\n  README.md:1: 'Of'\nok: links\n", output.read_text())


if __name__ == "__main__":
    unittest.main()
