#!/usr/bin/env python3
"""Does everything that docs/requirements.md names hold?

The argument is what `cargo test` printed. Each test that the page names must have run there and passed, and each
file that it links to must be there.
"""

import pathlib
import re
import sys

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "requirements.md"
# `Running tests/order.rs (target/debug/deps/order-0123abcd)`
SUITE = re.compile(r"^\s*Running .*/(\w+)-[0-9a-f]+\)$")
# `test sequence::a_gap ... ok`; what a test prints may stand before the last word.
TEST = re.compile(r"^test (\S+) \.\.\. (?:.*\b)?(ok|FAILED|ignored.*)$")
ROW = re.compile(r"^\| (S\d-\d{3}) \|.*\| (.*) \|$")
NAME = re.compile(r"`(\w+(?:::\w+)+)`")
LINK = re.compile(r"\]\(([^)#]+)\)")


def passed(log):
    """Each test that ran, as `suite::test`, and whether every run of it passed."""
    tests, suite = {}, None
    for line in log.splitlines():
        if found := SUITE.match(line):
            suite = found[1]
        elif found := TEST.match(line):
            name = f"{suite}::{found[1]}"
            tests[name] = tests.get(name, True) and found[2] == "ok"
    return tests


def main():
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} <what `cargo test` printed>")
    tests = passed(pathlib.Path(sys.argv[1]).read_text(errors="replace"))
    faults, rows, named = [], 0, set()
    for line in PAGE.read_text().splitlines():
        if not (row := ROW.match(line)):
            continue
        rows += 1
        shown = NAME.findall(row[2])
        links = LINK.findall(row[2])
        named.update(shown)
        if not shown and not links and "**open**" not in row[2]:
            faults.append(f"{row[1]}: nothing shows it")
        faults += [f"{row[1]}: `{test}` did not run" for test in shown if test not in tests]
        faults += [f"{row[1]}: `{test}` did not pass" for test in shown if tests.get(test) is False]
        faults += [f"{row[1]}: there is no file `{link}`" for link in links if not (PAGE.parent / link).exists()]
    if rows == 0:
        faults.append(f"{PAGE} has no rows")
    if faults:
        sys.exit("\n".join(faults))
    print(f"{rows} requirements, shown by {len(named)} tests that ran and passed")


main()
