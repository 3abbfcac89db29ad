#!/usr/bin/env python3
"""Fails if an example that has a PyTorch file beside it has more than twice the lines of that file.

    scripts/example_lines.py

Counts formatted lines without blank lines, comments, documentation and imports.
"""
import ast
import re
import sys
from pathlib import Path

LIMIT = 2.0
USE = re.compile(r"^use [^;]*;\n", re.M)
COMMENT = re.compile(r"^\s*//.*\n", re.M)


def rust_lines(text):
    code = COMMENT.sub("", USE.sub("", text))
    return sum(1 for line in code.splitlines() if line.strip())


def python_lines(text):
    left_out = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out.update(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    code = [line.strip() for number, line in lines if number not in left_out]
    return sum(1 for line in code if line and not line.startswith("#"))


def main():
    code = 0
    for peer in sorted((Path(__file__).parent.parent / "examples").glob("*.py")):
        rust, python = rust_lines(peer.with_suffix(".rs").read_text()), python_lines(peer.read_text())
        print(f"{peer.stem}: {rust} lines, {python} in PyTorch: {rust / python:.2f} x")
        if rust > LIMIT * python:
            print(f"{LIMIT:.0f} x is promised")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
