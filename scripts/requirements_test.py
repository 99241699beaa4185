#!/usr/bin/env python3
"""Does requirements.py refuse what breaks its rules? Each breach is planted in a small project that is sound."""

import pathlib
import sys
import tempfile

sys.dont_write_bytecode = True
from requirements import IDS, Project, passed

LOG = """\
     Running unittests src/lib.rs (target/debug/deps/some_package-0123abcd)
test part::tests::small ... ok
     Running tests/all/main.rs (target/debug/deps/all-0123abcd)
test suite::first ... what it prints ok
test suite::module::second ... ok
test suite::of_a_macro ... ok
test suite::broken ... FAILED
test suite::left_out ... ignored
test in_no_module ... ok
"""

# Each test carries the id of the row that names it; `broken` and those behind it are named by breaches alone.
MAIN = """\
mod suite;

#[test]
fn in_no_module() {
    // S0-006.
    assert!(true);
}
"""
SUITE = """\
mod module;

fn shows_it() {
    // S0-002.
    assert_eq!(1, 1);
}

#[tokio::test]
async fn first() {
    shows_it();
}

macro_rules! made {
    ($($name:ident)+) => {$(
        #[test]
        fn $name() {
            // S0-004: what this is about.
            assert!(true);
        }
    )+};
}

made! { of_a_macro another }

#[test]
fn broken() {
    // S0-010.
    assert!(false);
}

#[test]
#[ignore]
fn left_out() {
    // S0-010.
    assert!(true);
}

#[test]
fn never_ran() {
    // S0-010.
    assert!(true);
}

/// S0-010.
#[test]
fn above() {
    assert!(true);
}

#[test]
fn nothing_is_asserted_near() {
    assert!(true);
    // S0-010.
    let a = 1;
    let b = 2;
    drop(a + b);
    assert!(true);
}

fn helper() {
    // S0-010.
    assert!(true);
}
"""
MODULE = """\
#[test]
fn second() {
    let check = |n: u32| assert_eq!(n, 1);
    // S0-001, S0-003.
    check(1);
}
"""
UNIT = """\
#[cfg(test)]
mod tests {
    #[test]
    fn small() {
        // S0-005.
        assert!(true);
    }
}
"""
TEXT = """\
# A page

## The part, that says `it`

It is so. <!-- S0-033, S0-010 -->

### Below

So is this. <!-- S1-063 -->

<!-- S2-019 -->

## Another part

```
## no heading
```
"""
SHOWN = {
    "S0-001": "`suite::module::second`",
    "S0-002": "`suite::first`",
    "S0-003": "`suite::module::second`, [more](page.md#a-page), **open**: alerts",
    "S0-004": "`suite::of_a_macro`",
    "S0-005": "`some_package::part::tests::small`",
    "S0-006": "`all::in_no_module`",
    "S0-033": "[page](page.md#the-part-that-says-it)",
    "S1-063": "[page](page.md#the-part-that-says-it)",
}
TEXT += "\nAnd more. <!-- S0-003 -->\n"

BREACHES = [
    ("`suite::broken`", "S0-010: `suite::broken` did not pass"),
    ("`suite::left_out`", "S0-010: `suite::left_out` did not pass"),
    ("`suite::never_ran`", "S0-010: `suite::never_ran` did not run"),
    ("`suite::nowhere`", "S0-010: there is no test `suite::nowhere`"),
    ("`suite::helper`", "S0-010: there is no test `suite::helper`"),
    ("`suite::first`", "S0-010: no assertion of `suite::first` carries the id"),
    ("`suite::above`", "S0-010: no assertion of `suite::above` carries the id"),
    ("`suite::nothing_is_asserted_near`", "S0-010: no assertion of `suite::nothing_is_asserted_near` carries the id"),
    ("", "S0-010: nothing shows it"),
    ("somebody says so", "S0-010: nothing shows it"),
    ("[page](page.md#the-part-that-says-it)", "S0-010: it asks for more than a sentence; a test shows it"),
    ("**open**", "S0-010: it waits for ``, which is none of"),
    ("**open**: some day", "S0-010: it waits for `some day`, which is none of"),
    ("`suite::first`, [page](page.md)", "S0-010: the link to `page.md` names no section"),
    ("`suite::first`, [page](page.md#no-heading)", "S0-010: `page.md` has no section `#no-heading`"),
    ("`suite::first`, [page](page.md#another-part)", "S0-010: no sentence of `page.md#another-part` carries"),
    ("`suite::first`, [page](nowhere.md#a-page)", "S0-010: there is no page `nowhere.md`"),
    ("`suite::first`, [code](../tests/suite.rs#first)", "S0-010: there is no page `../tests/suite.rs`"),
]


def faults(change=None, more="", **shown):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        cells = {**SHOWN, **{name.replace("_", "-"): cell for name, cell in shown.items()}}
        rows = [f"| {requirement} | what | {cells.get(requirement, '**open**: alerts')} |" for requirement in IDS]
        files = {
            "docs/page.md": TEXT,
            "docs/requirements.md": (change or "\n".join)(rows) + f"\n{more}\n",
            "part/Cargo.toml": '[package]\nname = "some-package"\n',
            "part/src/part.rs": UNIT,
            "part/tests/all/main.rs": MAIN,
            "part/tests/all/suite.rs": SUITE,
            "part/tests/all/suite/module.rs": MODULE,
        }
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return list(Project(root).faults(passed(LOG)))


def expect(found, expected):
    assert any(fault.startswith(expected) for fault in found), f"not refused: {expected}; only {found}"


assert faults() == [], faults()
for cell, expected in BREACHES:
    expect(faults(S0_010=cell), expected)
expect(faults(S2_019="[page](page.md#below)"), "S2-019: no sentence of `page.md#below` carries")
expect(faults(lambda rows: "\n".join(rows[1:])), "S0-001: it has no row")
expect(faults(lambda rows: "\n".join([*rows, rows[0]])), "S0-001: it has 2 rows")
expect(faults(more="| S0-052 | what | **open**: alerts |"), "S0-052: no source has it")
expect(faults(more="| S0-001 | what and no cell |"), "this is no row: | S0-001 |")
assert len(IDS) == len(set(IDS)) == 247
print(f"{len(BREACHES) + 5} breaches, each refused")
