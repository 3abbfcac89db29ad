#!/usr/bin/env python3
"""Fails on import circles between files of a crate, and on two public types of one name in a crate.

    scripts/check_structure.py [CRATE_FOLDER ...]

Reads `use` declarations and `crate::`, `self::`, `super::` paths as text. A path counts as an import of the file that
defines the item: re-exports are followed. A module does not import the files that it only declares or re-exports from,
and tests (`tests.rs`, `*_tests.rs`, `tests/`, `mod tests`) are left out.
"""
import re
import sys
from collections import defaultdict
from pathlib import Path

CRATES = ["cuda", "tensor", "autograd", "derive", "nn", "parallel", "models", "."]
ITEM = re.compile(
    r"^\s*pub(?:\([^)]*\))?\s+(?:unsafe\s+|async\s+|const\s+|extern\s+\"C\"\s+)*"
    r"(?:fn|struct|enum|trait|type|union|const|static|macro_rules!)\s+(\w+)", re.M)
PUBLIC_TYPE = re.compile(r"^pub\s+(?:struct|enum|trait|union|type)\s+(\w+)", re.M)
USE = re.compile(r"\b(pub(?:\([^)]*\))?\s+)?use\s+([^;]+);")
PATH = re.compile(r"\b(?:crate|self|super)(?:::\w+)+")


def without_comments_and_tests(text):
    text = re.sub(r'"(?:\\.|[^"\\])*"', '""', re.sub(r"//[^\n]*", "", text))
    found = re.search(r"#\[cfg\(test\)\]\s*mod\s+\w+\s*\{", text)
    return text[: found.start()] if found else text


def expand(tree, prefix=()):
    """The paths of a use tree: `a::{b, c as d}` gives (a, b) as b and (a, c) as d."""
    tree = tree.strip()
    brace = tree.find("{")
    if brace < 0:
        path, _, alias = tree.partition(" as ")
        parts = prefix + tuple(p.strip() for p in path.split("::") if p.strip())
        if parts and parts[-1] == "self":
            parts = parts[:-1]
        if parts:
            yield parts, alias.strip() or parts[-1]
        return
    head = tuple(p.strip() for p in tree[:brace].split("::") if p.strip())
    depth, start, inner = 0, 0, tree[brace + 1 : tree.rindex("}")]
    for at, char in enumerate(inner + ","):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            if inner[start:at].strip():
                yield from expand(inner[start:at], prefix + head)
            start = at + 1


class Crate:
    def __init__(self, folder):
        self.folder, self.source = folder, folder / "src"
        self.files, self.text = {}, {}
        for path in sorted(self.source.rglob("*.rs")):
            inside = path.relative_to(self.source)
            if any(p == "tests" or p.endswith("tests.rs") for p in inside.parts) or path.name == "main.rs":
                continue
            module = inside.with_suffix("").parts
            module = module[:-1] if module[-1] in ("mod", "lib") else module
            self.files[module] = path
            self.text[module] = without_comments_and_tests(path.read_text())
        self.items = {m: set(ITEM.findall(t)) for m, t in self.text.items()}
        self.exports = {m: self.uses(m, public=True) for m in self.text}

    def absolute(self, module, path):
        """The path from the crate's root, or None outside of the crate."""
        if path[0] == "crate":
            return path[1:]
        base, at = module, 0
        while at < len(path) and path[at] in ("self", "super"):
            base, at = (base[:-1] if path[at] == "super" else base), at + 1
        if at == 0 and module + path[:1] not in self.files:
            return None
        return base + path[at:]

    def uses(self, module, public):
        found = []
        for visibility, tree in USE.findall(self.text[module]):
            if bool(visibility) == public:
                for path, name in expand(tree):
                    target = self.absolute(module, path)
                    if target is not None:
                        found.append((target, name))
        return found

    def defining(self, target, depth=0):
        """The modules that a path from the root leads to."""
        for cut in range(len(target), -1, -1):
            if target[:cut] in self.files:
                break
        else:
            return set()
        module, rest = target[:cut], target[cut:]
        if not rest or depth > 8:
            return {module} if module else set()
        name = rest[0]
        if name == "*":
            return {module}
        for path, exported in self.exports[module]:
            if exported in (name, "*") and path != target:
                through = path[:-1] + (name,) if exported == "*" else path
                deeper = self.defining(through, depth + 1)
                if deeper and (exported != "*" or any(name in self.items[m] for m in deeper)):
                    return deeper
        return {module}

    def imports(self):
        edges = defaultdict(set)
        for module, text in self.text.items():
            paths = [target for target, _ in self.uses(module, public=False)]
            body = USE.sub("", text)
            for path in PATH.findall(body):
                target = self.absolute(module, tuple(path.split("::")))
                if target is not None:
                    paths.append(target)
            for target in paths:
                edges[module] |= self.defining(target) - {module}
        return edges

    def circles(self):
        """Sets of files that import each other (Tarjan's strongly connected components)."""
        edges, index, low, stack, circles = self.imports(), {}, {}, [], []

        def visit(node):
            index[node] = low[node] = len(index)
            stack.append(node)
            for to in sorted(edges[node]):
                if to not in index:
                    visit(to)
                    low[node] = min(low[node], low[to])
                elif to in stack:
                    low[node] = min(low[node], index[to])
            if low[node] == index[node]:
                at = stack.index(node)
                group = stack[at:]
                del stack[at:]
                if len(group) > 1:
                    circles.append((group, edges))

        for module in sorted(self.files):
            if module not in index:
                visit(module)
        return circles


def main():
    root = Path(__file__).resolve().parent.parent
    failures = 0
    for folder in sys.argv[1:] or CRATES:
        crate = Crate(root / folder)
        for group, edges in crate.circles():
            failures += 1
            print("files import each other:")
            for module in group:
                for to in sorted(edges[module] & set(group)):
                    a, b = crate.files[module], crate.files[to]
                    print(f"  {a.relative_to(root)} -> {b.relative_to(root)}")
        types = defaultdict(list)
        for module, text in crate.text.items():
            for name in PUBLIC_TYPE.findall(text):
                types[name].append(str(crate.files[module].relative_to(root)))
        for name, files in sorted(types.items()):
            if len(files) > 1:
                failures += 1
                print(f"{len(files)} public types are named {name}: {', '.join(files)}")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
