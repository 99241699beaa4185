#!/usr/bin/env python3
"""Writes the licences of everything that the program is linked from, with their texts.

Usage: licences.py <file>
"""

import json
import subprocess
import sys
from pathlib import Path

PREFIXES = ("license", "licence", "copying", "notice", "unlicense", "copyright")


def packages() -> list[dict]:
    """Packages that the program is linked from, without the project's own."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked"]
    command += ["--filter-platform", "x86_64-unknown-linux-gnu"]
    metadata = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    by_id = {package["id"]: package for package in metadata["packages"]}
    todo = [id for id, package in by_id.items() if package["name"] == "oncebox-cli"]
    seen = set(todo)
    while todo:
        for dependency in nodes[todo.pop()]["deps"]:
            # Neither tools of the build nor what tests need is in the program.
            is_linked = any(kind["kind"] is None for kind in dependency["dep_kinds"])
            if is_linked and dependency["pkg"] not in seen:
                seen.add(dependency["pkg"])
                todo.append(dependency["pkg"])
    members = set(metadata["workspace_members"])
    found = [by_id[id] for id in seen - members]
    return sorted(found, key=lambda package: (package["name"], package["version"]))


def texts(package: dict) -> list[str]:
    folder = Path(package["manifest_path"]).parent
    files = sorted(path for path in folder.iterdir() if path.name.lower().startswith(PREFIXES))
    return [path.read_text(errors="replace").strip() for path in files if path.is_file()]


def main() -> None:
    without = []
    with open(sys.argv[1], "w") as out:
        for package in packages():
            licence = package["license"] or ""
            found = texts(package)
            if not licence and not found:
                without.append(f"{package['name']} {package['version']}")
            out.write(f"{'=' * 80}\n{package['name']} {package['version']}: {licence}\n\n")
            out.write("\n\n".join(found) + "\n\n")
    if without:
        sys.exit(f"licences.py: no licence is known of: {', '.join(without)}")


if __name__ == "__main__":
    main()
