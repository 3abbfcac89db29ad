#!/usr/bin/env python3
"""Fails if files of a crate import each other, if a crate has two public types of one name, if a file is too long, or if a
page has Rust that is not compiled as a documentation test of the facade.

    scripts/check_structure.py [CRATE_FOLDER ...]

Reads the sources as text, without comments, literals and what is compiled for tests only. A path is an import of the
file that defines the item: `use` declarations and re-exports are followed. A file that declares a module, or
re-exports a name that it does not use, does not import it. Calls of methods are not seen.
"""
import re
import sys
from collections import defaultdict
from pathlib import Path

LONGEST = 400  # lines of a file
CRATES = ["cuda", "cuda/sim", "tensor", "autograd", "derive", "nn", "parallel", "data", "models", "mpi", "planner", "fuzz", "."]
TEXT = re.compile(
    r"""//[^\n]*|/\*.*?\*/|\bb?r(#*)".*?"\1|\bb?"(?:\\.|[^"\\])*"|"(?:\\.|[^"\\])*"|'(?:\\[^']*|[^\\'])'""", re.S)
USE = re.compile(r"\b(pub\s+)?use\s+([^;]+);")
MOD = re.compile(r"\bmod\s+\w+\s*;")
PATH = re.compile(r"\b\w+(?:::\w+)*")
ITEM = re.compile(r"\b(?:fn|struct|enum|trait|type|union|const|static|macro_rules!)\s+(\w+)")
RUST_BLOCK = re.compile(r"^```rust(?!,ignore)", re.M)
ITEM_UNDER_TEST = re.compile(r"\s*(?:#\[|pub\b|use\b|mod\b|fn\b|async\b|unsafe\b|impl\b|struct\b|enum\b|trait\b|type\b|const\b|static\b|macro_rules!)")
PUBLIC_TYPE = re.compile(r"^pub (?:struct|enum|trait|union|type) (\w+)", re.M)


def code_of(path):
    """The text without comments, literals, scopes of `pub`, and items under `cfg(test)`, and the names of test modules."""
    text = TEXT.sub("", path.read_text())
    code, at, test_modules = "", 0, set()
    for found in re.finditer(r"#\[cfg\((?:test|all\(test[^\]]*)\)\]", text):
        if found.start() < at:
            continue
        code += text[at : found.start()]
        at = depth = 0
        # Variants, arms and fields end with a comma, or with what surrounds them.
        ends = ";}" if ITEM_UNDER_TEST.match(text, found.end()) else ";},"
        for bracket in re.compile(r"[(\[{)\]};,]").finditer(text, found.end()):
            depth += {"(": 1, "[": 1, "{": 1, ";": 0, ",": 0}.get(bracket[0], -1)
            if depth <= 0 and bracket[0] in ends:
                at = bracket.end() if depth == 0 else bracket.start()
                break
        test_modules.update(re.findall(r"\bmod\s+(\w+)\s*;", text[found.end() : at]))
    return re.sub(r"\b(pub)\([^)]*\)", r"\1", code + text[at:]), test_modules


def expand(tree, prefix=()):
    """The paths of a use tree, with their names: `a::{b, c as d}` gives (a, b), b and (a, c), d."""
    head, brace, inner = tree.partition("{")
    head, _, alias = (part.strip() for part in head.partition(" as "))
    path = prefix + tuple(part.strip() for part in head.split("::") if part.strip())
    if not brace:
        path = path[:-1] if path[-1] == "self" and len(path) > 1 else path
        yield path, alias or path[-1]
        return
    depth, start = 0, 0
    inner = inner[: inner.rindex("}")] + ","
    for at, char in enumerate(inner):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            if inner[start:at].strip():
                yield from expand(inner[start:at], path)
            start = at + 1


class Crate:
    def __init__(self, folder):
        self.files, self.public_types = {}, defaultdict(set)
        code, tests = {}, set()
        for path in sorted((folder / "src").rglob("*.rs")):
            parts = path.relative_to(folder / "src").with_suffix("").parts
            module = parts[:-1] if parts[-1] in ("mod", "lib") else parts
            if module != ("main",):
                self.files[module] = path
                code[module], test_modules = code_of(path)
                tests.update(module + (name,) for name in test_modules)
        for module in list(self.files):
            if any(module[:end] in tests for end in range(len(module) + 1)):
                del self.files[module], code[module]
        self.bodies = {module: MOD.sub("", USE.sub("", text)) for module, text in code.items()}
        self.items = {module: set(ITEM.findall(text)) for module, text in self.bodies.items()}
        self.uses = {
            module: [(bool(public), path, name) for public, tree in USE.findall(text) for path, name in expand(tree)]
            for module, text in code.items()}
        self.names = {module: {name: path for _, path, name in uses} for module, uses in self.uses.items()}
        for module in code:
            path = self.files[module]
            # `gpt2_absent.rs` is compiled in place of `gpt2.rs`, without a feature.
            for name in PUBLIC_TYPE.findall(TEXT.sub("", path.read_text())):
                self.public_types[name].add(path.with_stem(path.stem.removesuffix("_absent")))

    def defining(self, module, path, seen=frozenset()):
        """The file that defines what `module` names by `path`; None for what is not of this crate, or is a module."""
        if (module, path) in seen:
            return None
        seen |= {(module, path)}
        at = 0
        if path[0] == "crate":
            module, at = (), 1
        while at < len(path) and path[at] in ("self", "super"):
            module, at = (module[:-1] if path[at] == "super" else module), at + 1
        relative = at > 0
        for at in range(at, len(path)):
            name, last = path[at], at + 1 == len(path)
            child, used = module + (name,), self.names[module].get(name)
            if used and (last or child not in self.files):
                if used[0] == name and child not in self.files:
                    return None  # of another crate
                return self.defining(module, used + path[at + 1 :], seen)
            if name in self.items[module] and (last or child not in self.files):
                return module
            if child not in self.files:
                return module if relative else None
            module, relative = child, True
        return None

    def imports(self):
        """The files that each file imports."""
        edges = {module: set() for module in self.files}
        for module, body in self.bodies.items():
            words = set(PATH.findall(body))
            paths = [tuple(word.split("::")) for word in words if "::" in word]
            heads = {word.split("::")[0] for word in words}
            paths += [path for public, path, name in self.uses[module] if not public or name in heads]
            found = {self.defining(module, path) for path in paths}
            edges[module] = found - {module, None}
        return edges


def circles(edges):
    """Sets of files that import each other, directly or through others."""
    def reachable(module):
        found, todo = set(), [module]
        while todo:
            new = edges[todo.pop()] - found
            found |= new
            todo += new
        return found

    reach = {module: reachable(module) for module in edges}
    return {frozenset(other for other in reach[module] if module in reach[other]) for module in edges} - {frozenset()}


def sources(root):
    """All Rust files of the workspace, with their numbers of lines."""
    for path in sorted(root.rglob("*.rs")):
        if "target" not in path.relative_to(root).parts:
            yield path, path.read_text().count("\n")


def untested_pages(root):
    """Pages with blocks of Rust that `src/lib.rs` does not include."""
    included = re.findall(r'include_str!\("\.\./([^"]+\.md)"\)', (root / "src/lib.rs").read_text())
    pages = [*root.glob("*.md"), *root.glob("*/ARCHITECTURE.md"), *(root / "docs").rglob("*.md")]
    return sorted(
        page.relative_to(root) for page in pages
        if RUST_BLOCK.search(page.read_text()) and str(page.relative_to(root)) not in included)


def main():
    root = Path(__file__).resolve().parent.parent
    failed = False
    for path, lines in sources(root):
        if lines > LONGEST:
            failed = True
            print(f"{path.relative_to(root)} has {lines} lines, more than {LONGEST}: split it by idea")
    for page in untested_pages(root):
        failed = True
        print(f"{page} has blocks of Rust that no test compiles: include it in `documentation` of src/lib.rs")
    for folder in sys.argv[1:] or CRATES:
        crate = Crate(root / folder)
        shown = lambda path: str(path.relative_to(root))
        edges = crate.imports()
        for circle in sorted(circles(edges), key=sorted):
            failed = True
            print("files import each other:")
            for module in sorted(circle):
                for to in sorted(edges[module] & circle):
                    print(f"  {shown(crate.files[module])} -> {shown(crate.files[to])}")
        for name, files in sorted(crate.public_types.items()):
            if len(files) > 1:
                failed = True
                print(f"{len(files)} public types are named {name}: {', '.join(sorted(map(shown, files)))}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
