#!/usr/bin/env python3
"""Does docs/requirements.md say of every requirement what shows it, and is it so?

The arguments are what `cargo test` printed, here and in the workspace of guests. Every id of the five sources stands
in the page once, in a row that ends with one or more of these, with commas between them:

* a test, as `file::path::name`, or `crate::path::name` for a unit test. It ran and passed, and the id is in a comment right above an assertion, in the test's
  body or in a function of the same file that the body comes by;
* a link to a section of a page, in which `<!-- S0-033 -->` stands at the sentence. By itself it is enough for what is
  only said, see STATEMENTS;
* `**open**: <what it waits for>`, see CAPABILITIES.
"""

import functools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# How many requirements each source has, counted from 1.
SOURCES = {"S0": 51, "S1": 129, "S2": 20, "S3": 25, "S4": 22}
IDS = [f"{source}-{number:03}" for source, count in SOURCES.items() for number in range(1, count + 1)]
# What only a page can show, since it asks for a sentence and for no behaviour.
STATEMENTS = {"S0-033", "S0-043", "S0-044", "S1-032", "S1-033", "S1-063", "S2-019", "S2-020", "S3-009", "S3-014", "S3-018", "S4-022"}
# What is not built yet, as the page calls it.
CAPABILITIES = {"alerts", "key versions", "other brokers"}

# `Running tests/protocol/main.rs (target/debug/deps/protocol-0123abcd)`
SUITE = re.compile(r"^\s*Running (unittests )?.*/(\w+)-[0-9a-f]+\)$")
# `test sequence::a_gap ... ok`; what a test prints may stand before the last word.
TEST = re.compile(r"^test (\S+) \.\.\. (?:.*\b)?(ok|FAILED|ignored.*)$")
ROW = re.compile(r"^\| (S\d-\d{3}) \| .+ \| (.*) \|$")
NAME = re.compile(r"`(\w+(?:::\w+)+)`")
LINK = re.compile(r"\]\(([^)]+)\)")
OPEN = re.compile(r"\*\*open\*\*(?:: ([a-z ]+[a-z]))?")
ID = re.compile(r"\bS\d-\d{3}\b")
COMMENT = re.compile(r"<!--(.*?)-->")
FUNCTION = re.compile(r"^( *)(?:pub(?:\([\w ]+\))? )?(?:async )?(?:unsafe )?fn (\w+)(.*)$")
CLOSURE = re.compile(r"^( *)let (?:mut )?(\w+) =(?: async)?(?: move)? ?\|")
MACRO = re.compile(r"^( *)macro_rules! (\w+)")
ASSERTS = re.compile(
    r"\b(?:assert\w*|ensure|bail|panic|unreachable)!|\b(?:unwrap_err|expect_err)\(|\.(?:check\w*|until\w*|finish|fails\w*)\("
)
# How far below its comment an assertion may begin, in lines of code.
NEAR = 3


def passed(log):
    """Each test that ran, and whether every run of it passed. In front of its module stands the crate of a unit test; one
    of another kind that is in no module is in the file that its binary has its name from."""
    tests, suite, is_unit = {}, None, False
    for line in log.splitlines():
        if found := SUITE.match(line):
            is_unit, suite = bool(found[1]), found[2]
        elif found := TEST.match(line):
            name = found[1] if "::" in found[1] and not is_unit else f"{suite}::{found[1]}"
            tests[name] = tests.get(name, True) and found[2] == "ok"
    return tests


class Source:
    """A file of Rust, with what is defined in it. It is formatted, so that a definition ends where its indentation does."""

    def __init__(self, path):
        self.lines = path.read_text().splitlines()
        self.blocks = {}
        for at, line in enumerate(self.lines):
            for kind, pattern in (("fn", FUNCTION), ("let", CLOSURE), ("macro", MACRO)):
                if found := pattern.match(line):
                    self.blocks.setdefault(found[2], []).append((kind, at, self.end(at, found[1])))
        self.asserting = set()
        while more := {name for name, blocks in self.blocks.items() if any(map(self.asserts, blocks))} - self.asserting:
            self.asserting |= more

    def end(self, at, indentation):
        """The line with which a definition ends."""
        if self.lines[at].rstrip().endswith(("}", "};", ";")):
            return at
        ends = (f"{indentation}}}", f"{indentation}}};")
        return next((n for n in range(at + 1, len(self.lines)) if self.lines[n] in ends), at)

    def text(self, block):
        return "\n".join(self.lines[block[1] : block[2] + 1])

    def asserts(self, block):
        """Whether it asserts something, by itself or by calling what does."""
        text = self.text(block)
        return ASSERTS.search(text) is not None or bool(self.asserting & set(re.findall(r"\b(\w+)\(", text)))

    def tests(self, name):
        """The definitions of a test: a function with the attribute, or a macro that is given the name."""
        found = []
        for kind, at, end in self.blocks.get(name, []):
            above = at - 1
            while above >= 0 and self.lines[above].lstrip().startswith(("#[", "//")):
                if kind == "fn" and re.match(r"\s*#\[(tokio::)?test\b", self.lines[above]):
                    found.append((kind, at, end))
                    break
                above -= 1
        for macro, blocks in self.blocks.items():
            given = re.search(rf"^{macro}! *[({{\[](.*)[)}}\]]", "\n".join(self.lines), re.MULTILINE)
            if given and re.search(rf"\b{name}\b", given[1]):
                found += [block for block in blocks if block[0] == "macro" and "#[" in self.text(block)]
        return found

    def reached(self, block):
        """The definition, and those of this file that it comes by."""
        found, left = set(), [block]
        while left:
            block = left.pop()
            if block in found:
                continue
            found.add(block)
            words = set(re.findall(r"\w+", "\n".join(line.split("//")[0] for line in self.text(block).splitlines())))
            left += [other for word in words for other in self.blocks.get(word, []) if other[0] == "fn"]
        return found

    def carries(self, block, requirement):
        """Whether the id is in a comment right above an assertion."""
        for _, start, end in self.reached(block):
            for at in range(start, end + 1):
                _, is_comment, comment = self.lines[at].partition("//")
                if is_comment and requirement in ID.findall(comment) and self.asserts_at(at, end):
                    return True
        return False

    def asserts_at(self, at, end):
        code = [line for line in self.lines[at : end + 1] if line.split("//")[0].strip()][:NEAR]
        calls = {name for line in code for name in re.findall(r"\b(\w+)\(", line)}
        return bool(calls & self.asserting) or any(ASSERTS.search(line) for line in code)


class Project:
    def __init__(self, root):
        self.root = root
        self.docs = root / "docs"
        self.page = self.docs / "requirements.md"

    @functools.cached_property
    def packages(self):
        """The sources of each file of tests and what is below it: `tests/protocol/order.rs` and `tests/protocol/order` for
        `order`, `tests/sabotage/main.rs` for `sabotage`, `src` of a package for its unit tests."""
        found = {}
        for manifest in self.root.rglob("Cargo.toml"):
            if {"target", "third_party", "node_modules"} & set(manifest.relative_to(self.root).parts):
                continue
            folder = manifest.parent
            if name := re.search(r'^\[package\]\n(?:.*\n)*?name = "([^"]+)"', manifest.read_text(), re.MULTILINE):
                found.setdefault(name[1].replace("-", "_"), []).extend(sorted((folder / "src").rglob("*.rs")))
            for suite in sorted([*(folder / "tests").glob("*.rs"), *(folder / "tests").glob("*/*.rs")]):
                name = suite.parent.name if suite.name == "main.rs" else suite.stem
                found.setdefault(name, []).extend([suite, *sorted(suite.with_suffix("").rglob("*.rs"))])
        return found

    @functools.cache
    def source(self, path):
        return Source(path)

    def find(self, test):
        """Where a test is defined: the file of its module, as far as modules are files."""
        suite, *modules, name = test.split("::")
        found = []
        for path in self.packages.get(suite, []):
            found += [(path, block) for block in self.source(path).tests(name)]
        # A module is a file, a folder or a part of a file: of several, the one whose path has the most of their names.
        def shared(path):
            return len(set(modules) & {*path.parts, path.stem})

        most = max((shared(path) for path, _ in found), default=0)
        return [(path, block) for path, block in found if shared(path) == most]

    def section(self, page, anchor):
        """The text under a heading, as a browser finds it; `None` if there is no such heading."""
        lines, depth, is_code = [], None, False
        for line in page.read_text().splitlines():
            is_code ^= line.startswith("```")
            heading = None if is_code else re.match(r"(#+) (.*)", line)
            if heading and depth is not None and len(heading[1]) <= depth:
                break
            if depth is not None:
                lines.append(line)
            elif heading and re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-") == anchor:
                depth = len(heading[1])
        return None if depth is None else lines

    def test_faults(self, requirement, test, ran):
        definitions = self.find(test)
        if not definitions:
            yield f"there is no test `{test}`"
        elif len(definitions) > 1:
            yield f"`{test}` is {len(definitions)} tests"
        elif not self.source(definitions[0][0]).carries(definitions[0][1], requirement):
            yield f"no assertion of `{test}` carries the id, in {definitions[0][0].relative_to(self.root)}"
        if test not in ran:
            yield f"`{test}` did not run"
        elif not ran[test]:
            yield f"`{test}` did not pass"

    def link_faults(self, requirement, link):
        name, _, anchor = link.partition("#")
        page = self.docs / name
        if page.suffix != ".md" or not page.is_file():
            yield f"there is no page `{name}`"
        elif not anchor:
            yield f"the link to `{name}` names no section"
        elif (section := self.section(page, anchor)) is None:
            yield f"`{name}` has no section `#{anchor}`"
        elif not any(requirement in ID.findall(comment) for line in section for comment in self.at_text(line)):
            yield f"no sentence of `{link}` carries `<!-- {requirement} -->`"

    @staticmethod
    def at_text(line):
        """The comments of a line that has more than comments."""
        return COMMENT.findall(line) if COMMENT.sub("", line).strip() else []

    def faults(self, ran):
        seen = {}
        for line in self.page.read_text().splitlines():
            if not re.match(r"\|\s*S\d", line):
                continue
            if not (row := ROW.match(line)):
                yield f"this is no row: {line}"
                continue
            requirement, cell = row[1], row[2]
            if requirement not in IDS:
                yield f"{requirement}: no source has it"
            seen[requirement] = seen.get(requirement, 0) + 1
            tests, links, is_open = NAME.findall(cell), LINK.findall(cell), OPEN.findall(cell)
            for test in tests:
                yield from (f"{requirement}: {fault}" for fault in self.test_faults(requirement, test, ran))
            for link in links:
                yield from (f"{requirement}: {fault}" for fault in self.link_faults(requirement, link))
            yield from (f"{requirement}: it waits for `{name}`, which is none of {sorted(CAPABILITIES)}" for name in is_open if name not in CAPABILITIES)
            if not (tests or links or is_open):
                yield f"{requirement}: nothing shows it"
            if links and not (tests or is_open) and requirement not in STATEMENTS:
                yield f"{requirement}: it asks for more than a sentence; a test shows it"
        yield from (f"{requirement}: it has no row" for requirement in IDS if requirement not in seen)
        yield from (f"{requirement}: it has {count} rows" for requirement, count in seen.items() if count > 1)

    def counts(self):
        rows = [row[2] for line in self.page.read_text().splitlines() if (row := ROW.match(line))]
        waiting = sum(OPEN.search(cell) is not None for cell in rows)
        tests = {test for cell in rows for test in NAME.findall(cell)}
        return f"{len(rows)} requirements, {waiting} of them open; {len(tests)} tests that ran and passed carry their ids"


def main():
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} <what `cargo test` printed>…")
    ran = {}
    for log in sys.argv[1:]:
        for test, is_passed in passed(pathlib.Path(log).read_text(errors="replace")).items():
            ran[test] = ran.get(test, True) and is_passed
    project = Project(ROOT)
    if faults := list(project.faults(ran)):
        sys.exit("\n".join(faults))
    print(project.counts())


if __name__ == "__main__":
    main()
