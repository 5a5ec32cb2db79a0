"""What `scripts/check_prose.py` reads: the parts of Markdown, and the comments of source files."""
