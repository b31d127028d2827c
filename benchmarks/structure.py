"""A branch beside main: imports between rooms, sizes of files, and golden plans.

    python -m benchmarks.structure                 # the working tree against main
    python -m benchmarks.structure --base HEAD~3   # or against any other commit

A *room* is a file or folder of `autopar/`. Every import counts, wherever it stands: inside a
function, under `TYPE_CHECKING`, relative, or by a literal `import_module`. Functions below take
`Sources`, texts by path, so the working tree, a commit and a toy package look the same to them.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
GOLDEN = "tests/golden"
FOLDERS = ("autopar", GOLDEN)
LONG_FUNCTION = 60
NUM_LARGEST = 10

Sources = Mapping[str, str]
Graph = dict[str, set[str]]

parse = cache(ast.parse)


def read_folder(root: Path, *folders: str) -> dict[str, str]:
    """The Python and JSON files below folders of root, by path from root."""
    files = (path for folder in folders for path in sorted((root / folder).rglob("*")))
    return {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in files
        if path.suffix in (".py", ".json")
    }


def read_commit(commit: str, *folders: str) -> dict[str, str]:
    """The same of a commit."""
    command = ["git", "archive", commit, *folders]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True)
    if archive.returncode:
        reason = archive.stderr.decode().splitlines()[0]
        raise SystemExit(f"cannot read {commit!r}: {reason}. Name another commit with --base.")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        return {
            member.name: file.read().decode()
            for member in tar
            if member.name.endswith((".py", ".json")) and (file := tar.extractfile(member))
        }


# -- imports


def imported_names(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of all that a module of the given package imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    yield node.lineno, alias.name
            case ast.ImportFrom():
                parents = package[: len(package) - node.level + 1] if node.level else ()
                base = ".".join((*parents, *([node.module] if node.module else [])))
                for alias in node.names:
                    yield node.lineno, f"{base}.{alias.name}"
            case ast.Call(
                func=ast.Name(id=call) | ast.Attribute(attr=call),
                args=[ast.Constant(value=str(name)), *_],
            ) if call in {"import_module", "__import__"}:
                yield node.lineno, name


def import_graph(sources: Sources) -> Graph:
    """Which file imports which, by module name; a package is its `__init__.py`."""
    modules = {_module(path): path for path in sources if path.endswith(".py")}
    graph: Graph = {}
    for module, path in modules.items():
        package = tuple(path.removesuffix(".py").split("/")[:-1])
        names = {name for _, name in imported_names(parse(sources[path]), package)}
        nearest = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = (nearest & modules.keys()) - {module}
    return graph


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room_of(module: str) -> str:
    """`autopar.ir.plan` is in `ir`, and `autopar` itself in `__init__`."""
    return [*module.split("."), "__init__"][1]


def room_graph(graph: Graph) -> Graph:
    """Which room imports which."""
    rooms: Graph = {room_of(module): set() for module in graph}
    for module, targets in graph.items():
        rooms[room_of(module)] |= {room_of(target) for target in targets} - {room_of(module)}
    return rooms


def circles(graph: Graph) -> list[list[str]]:
    """Groups of names that reach each other (strongly connected components of two or more)."""
    reached = {name: _reached(graph, name) for name in graph}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    return sorted(map(list, groups))


def _reached(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


def longest_chain(graph: Graph) -> list[str]:
    """The longest way along imports; empty if there are circles, since then it has no end."""
    if circles(graph):
        return []

    @cache
    def chain(name: str) -> tuple[str, ...]:
        return (name, *max(map(chain, sorted(graph[name])), key=len, default=()))

    return list(max(map(chain, sorted(graph)), key=len, default=()))


# -- sizes


def num_lines(sources: Sources) -> dict[str, int]:
    """Lines of every Python file."""
    return {path: len(text.splitlines()) for path, text in sources.items() if path.endswith(".py")}


def room_lines(sources: Sources) -> Counter[str]:
    """Lines of every room."""
    lines: Counter[str] = Counter()
    for path, num in num_lines(sources).items():
        lines[room_of(_module(path))] += num
    return lines


def long_functions(sources: Sources, limit: int = LONG_FUNCTION) -> dict[str, int]:
    """Lines of every function that is longer than the limit, by `path:name`."""
    return {
        f"{path}:{node.name}": length
        for path, text in sources.items()
        if path.endswith(".py")
        for node in ast.walk(parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > limit
    }


def repeated_classes(sources: Sources) -> dict[str, list[str]]:
    """The files of every class name that is defined more than once."""
    found: dict[str, list[str]] = {}
    for path, text in sources.items():
        if path.endswith(".py"):
            for node in ast.walk(parse(text)):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(path)
    return {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}


# -- golden plans


def golden_changes(before: Sources, after: Sources) -> dict[str, list[str]]:
    """What changed in every golden plan: its objective, and the specs of its arrays. Arrays whose
    paths end alike, as a parameter's and its moments' do, share a line if they changed alike."""
    changes = {}
    for path in sorted(path for path in {*before, *after} if path.startswith(GOLDEN)):
        old, new = (_flat(json.loads(side.get(path, "{}"))) for side in (before, after))
        groups: dict[tuple[str, str], list[str]] = {}
        for key in sorted(old.keys() | new.keys(), key=lambda key: (key != "objective", key)):
            if old.get(key) != new.get(key):
                change = f"{old.get(key, 'absent')} → {new.get(key, 'absent')}"
                groups.setdefault((key[key.find("['") :], change), []).append(key)
        if groups:
            changes[path] = [
                f"{min(keys, key=len)}{f' and {len(keys) - 1} more' * (len(keys) > 1)}: {change}"
                for (_, change), keys in groups.items()
            ]
    return changes


def _flat(value: object, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, dict):
        return {prefix: str(value)}
    parts = (_flat(inner, f"{prefix} {key}".strip()) for key, inner in value.items())
    return {key: text for part in parts for key, text in part.items()}


# -- the text


def report(before: Sources, after: Sources) -> str:
    """All of the above for two trees, as text."""
    lines = [*_imports_text(before, after), "", *_sizes_text(before, after), ""]
    lines += ["Golden plans"]
    changes = golden_changes(before, after)
    for path, changed in changes.items():
        lines += [f"  {path}", *(f"    {line}" for line in changed)]
    return "\n".join(lines if changes else [*lines, "  unchanged"])


def _imports_text(before: Sources, after: Sources) -> Iterator[str]:
    old, new = import_graph(before), import_graph(after)
    old_rooms, new_rooms = room_graph(old), room_graph(new)
    yield "Imports between rooms (+ new, - gone)"
    for room, now in sorted(new_rooms.items()):
        was = old_rooms.get(room, set())
        names = [*sorted(now & was), *(f"+{x}" for x in sorted(now - was))]
        yield f"  {room:18} {' '.join([*names, *(f'-{x}' for x in sorted(was - now))])}".rstrip()
    if gone := sorted(old_rooms.keys() - new_rooms.keys()):
        yield f"  rooms that are gone: {' '.join(gone)}"
    for what, was, now in (("rooms", old_rooms, new_rooms), ("files", old, new)):
        num_was, num_now = (sum(map(len, graph.values())) for graph in (was, now))
        chain = longest_chain(now)
        yield f"  {what}: {num_was} → {num_now} imports"
        yield f"    longest chain {len(longest_chain(was))} → {len(chain)}: " + " > ".join(
            name.removeprefix("autopar.") for name in chain
        )
        yield from (f"    circle: {' '.join(circle)}" for circle in circles(now))


def _sizes_text(before: Sources, after: Sources) -> Iterator[str]:
    old, new = room_lines(before), room_lines(after)
    yield "Lines"
    for room, num in new.most_common():
        yield f"  {room:18} {old[room]:6} → {num:6}  {num - old[room]:+}"
    yield f"  {'all':18} {old.total():6} → {new.total():6}  {new.total() - old.total():+}"
    yield from _listed(f"The {NUM_LARGEST} largest files", num_lines, before, after, NUM_LARGEST)
    yield from _listed(f"Functions over {LONG_FUNCTION} lines", long_functions, before, after)
    yield "Class names used twice"
    repeated = repeated_classes(after)
    yield from (f"  {name}: {' '.join(paths)}" for name, paths in repeated.items())
    if not repeated:
        yield "  none"


def _listed(
    title: str,
    measure: Callable[[Sources], dict[str, int]],
    before: Sources,
    after: Sources,
    most: int | None = None,
) -> Iterator[str]:
    """The largest numbers of a measure, with what they were."""
    old, new = measure(before), measure(after)
    yield title
    for name, number in sorted(new.items(), key=lambda item: -item[1])[:most]:
        yield f"  {number:4} {name}" + (f"  (was {old[name]})" if name in old else "")
    if not new:
        yield "  none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", default="main", help="the commit to compare with")
    base = parser.parse_args().base
    print(report(read_commit(base, *FOLDERS), read_folder(ROOT, *FOLDERS)))


if __name__ == "__main__":
    main()
