#!/usr/bin/env python3
"""Has every state and reason of docs/inbox.md been reached by a test, and does the page say the way out of each?

The argument is the file in which the tests note what they came by.
"""

import pathlib
import re
import sys

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "inbox.md"
NAME = re.compile(r"`(\w+)(?::…|: …)?`")


def table(text, heading):
    """The first cells of the rows of the table that has this heading, each with the rest of its row."""
    rows = text.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [row.split("|", 2)[1:] for row in rows]


def named(rows):
    return {name for first, _ in rows for name in NAME.findall(first)}


def main():
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} <what the tests came by>")
    text = PAGE.read_text()
    reached = set(pathlib.Path(sys.argv[1]).read_text().splitlines())
    states, reasons, ways = named(table(text, "state")), table(text, "reason | state"), table(text, "reason | the way out")
    stuck = {name for first, rest in reasons for name in NAME.findall(first) if rest.split("|")[0].strip() != "`skipped`"}
    faults = [f"no test has reached the {kind} `{name}`" for kind, names in (("state", states), ("reason", named(reasons)))
              for name in sorted(names) if f"{kind} {name}" not in reached]
    faults += [f"the page does not say the way out of `{name}`" for name in sorted(stuck - named(ways))]
    known = {f"state {name}" for name in states} | {f"reason {name}" for name in named(reasons)}
    faults += [f"the page does not know the {line}" for line in sorted(reached - known)]
    if not states or not reasons or not ways:
        faults.append(f"{PAGE} has no tables of states, reasons and ways out")
    if faults:
        sys.exit("\n".join(faults))
    print(f"{len(states)} states and {len(named(reasons))} reasons, each reached by a test")


main()
