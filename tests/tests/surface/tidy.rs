//! The house rules that a reader relies on, held against the sources of the host. What could go
//! wrong: one word means two types, files import each other in a circle, a file or a function
//! outgrows a screen, a comment is a riddle, a code or a status is spelled out again, a page names
//! what is not there.
//!
//! `tidy/known.txt` lists the breaches that are still open. A breach beside it fails, and so does a
//! line of it that is no breach any more: the list only shrinks.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Lines that a file may have, without its tests.
const FILE_LINES_MAX: usize = 450;
/// Lines that a function may have, with its signature.
const FUNCTION_LINES_MAX: usize = 80;
/// Most files of Rust in README's table of a message's path.
const PATH_FILES_MAX: usize = 18;
/// Most lines of the bodies of `transact` and `run`, together.
const CORE_LINES_MAX: usize = 30;
/// Files that may import each other in a circle.
const CIRCLE_MAX: usize = 3;
/// How the comment of a function must not begin.
const RIDDLES: [&str; 8] =
    ["What ", "Whether ", "Who ", "How ", "Why ", "When ", "Where ", "The same"];

/// The file that names SQLSTATEs, and the files that name the statuses of messages and of outgoing
/// messages.
const SQLSTATES: &str = "host/model/src/sqlstate.rs";
const STATUSES: [&str; 2] = ["host/model/src/status.rs", "host/model/src/outgoing/status.rs"];
/// How a SQLSTATE begins: PostgreSQL's classes, and the class of the schema's own functions.
/// Numbers of five digits that are none begin otherwise.
const SQLSTATE_CLASSES: [&str; 35] = [
    "00", "01", "02", "08", "0A", "0F", "21", "22", "23", "24", "25", "26", "27", "28", "2B", "2D",
    "2F", "34", "38", "39", "3B", "3D", "3F", "40", "42", "44", "53", "540", "55", "57", "58",
    "F0", "P0", "XX", "OB",
];
/// Statuses of messages: those of the constraint `inbox_status_known`.
const MESSAGE_STATUSES: [&str; 9] = [
    "received",
    "in_progress",
    "completed",
    "failed_retryable",
    "failed_terminal",
    "parked",
    "waiting",
    "skipped",
    "discarded",
];

/// A source file of a crate of the host, without its tests.
struct Source {
    /// Folder of its crate below `host`.
    folder: String,
    /// Path from the project's folder.
    path: String,
    /// Module path in its crate.
    module: Vec<String>,
    lines: Vec<String>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn sources() -> Vec<Source> {
    let root = root();
    let mut found = Vec::new();
    for folder in fs::read_dir(root.join("host")).unwrap() {
        let src = folder.unwrap().path().join("src");
        if src.is_dir() {
            files(&src, &mut |path| {
                let relative = path.strip_prefix(&src).unwrap();
                found.push(Source::read(&root, &src, relative));
            });
        }
    }
    found.retain(|source| source.module.last().is_none_or(|name| name != "tests"));
    assert!(found.len() > 200, "{} files of the host", found.len());
    found
}

fn files(folder: &Path, take: &mut impl FnMut(&Path)) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "tests") {
                files(&path, take);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            take(&path);
        }
    }
}

/// Returns the lines of a file without its items that are compiled for tests alone.
fn without_tests(text: &str) -> Vec<String> {
    let mut kept = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line != "#[cfg(test)]" {
            kept.push(line.to_owned());
            continue;
        }
        let item = lines.find(|line| !line.starts_with('#'));
        if item.is_some_and(|item| !item.ends_with([';', '}'])) {
            lines.find(|line| line.starts_with('}'));
        }
    }
    kept
}

impl Source {
    fn read(root: &Path, src: &Path, relative: &Path) -> Self {
        let path = src.join(relative);
        let folder = src.parent().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
        let text = fs::read_to_string(&path).unwrap();
        let mut module: Vec<_> = relative
            .with_extension("")
            .iter()
            .map(|part| part.to_str().unwrap().to_owned())
            .collect();
        if ["mod", "lib", "main"].contains(&module.last().unwrap().as_str()) {
            module.pop();
        }
        Self {
            folder,
            path: path.strip_prefix(root).unwrap().to_str().unwrap().to_owned(),
            module,
            lines: without_tests(&text),
        }
    }

    /// The functions: the name, the first line of its comment, and how many lines it has.
    fn functions(&self) -> Vec<(String, Option<&str>, usize)> {
        let mut found = Vec::new();
        for (at, line) in self.lines.iter().enumerate() {
            let Some(name) = function_name(line) else { continue };
            let indentation = &line[..line.len() - line.trim_start().len()];
            let ends = |line: &String| line.strip_prefix(indentation) == Some("}");
            let one_line = line.ends_with('}') || line.ends_with(';');
            let length =
                if one_line { 1 } else { self.lines[at..].iter().position(ends).unwrap_or(0) + 1 };
            let above = self.lines[..at].iter().rev().map(|line| line.trim_start());
            let comment = above
                .take_while(|line| line.starts_with("///") || line.starts_with("#["))
                .filter_map(|line| line.strip_prefix("/// "))
                .last();
            found.push((name, comment, length));
        }
        found
    }

    /// The types that it defines.
    fn types(&self) -> impl Iterator<Item = String> {
        self.lines.iter().filter_map(|line| {
            let rest = visible(line.trim_start());
            let rest =
                ["struct ", "enum ", "trait "].iter().find_map(|kind| rest.strip_prefix(kind))?;
            Some(word(rest).to_owned())
        })
    }

    /// Returns its string literals, as they are written between their quotes.
    fn literals(&self) -> Vec<String> {
        let text: Vec<char> = self.lines.join("\n").chars().collect();
        let (mut found, mut at) = (Vec::new(), 0);
        while at < text.len() {
            let next = text.get(at + 1).copied();
            match text[at] {
                '/' if next == Some('/') => {
                    at += text[at..].iter().take_while(|letter| **letter != '\n').count();
                }
                '\'' if next == Some('\\') => {
                    at +=
                        3 + text[at + 3..].iter().take_while(|letter| **letter != '\'').count() + 1;
                }
                '\'' if text.get(at + 2) == Some(&'\'') => at += 3,
                '"' => {
                    let hashes =
                        text[..at].iter().rev().take_while(|letter| **letter == '#').count();
                    let before = at.checked_sub(hashes + 1).map(|before| text[before]);
                    let end =
                        end_of_literal(&text, at + 1, (before == Some('r')).then_some(hashes));
                    found.push(text[at + 1..end].iter().collect());
                    at = end + 1;
                }
                _ => at += 1,
            }
        }
        found
    }

    /// Returns the breaches of the rules about literals.
    fn literal_breaches(&self) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        for literal in self.literals() {
            if is_sqlstate(&literal) && self.path != SQLSTATES {
                found.insert(format!("SQLSTATE literal: {literal} in {}", self.path));
            }
            if MESSAGE_STATUSES.contains(&&*literal) && !STATUSES.contains(&self.path.as_str()) {
                found.insert(format!("status literal: {}", self.path));
            }
            // Plans that are avoided count as very dear, and a dear plan is compiled at each call.
            let words: Vec<_> = literal.split(|end: char| " \\;\n".contains(end)).collect();
            let words = words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>();
            let sets = |name: &str| {
                words.windows(3).any(|of| of[0].starts_with(name) && of[1..] == ["=", "off"])
            };
            if sets("enable_") && !sets("jit") {
                found.insert(format!("avoided plans that are compiled: {}", self.path));
            }
        }
        found
    }

    /// The modules of its crate that it imports.
    fn imports(&self) -> BTreeSet<Vec<String>> {
        let mut found = BTreeSet::new();
        for (at, line) in self.lines.iter().enumerate() {
            let Some(first) = visible(line).strip_prefix("use ") else { continue };
            let text = [&[first.to_owned()], &self.lines[at + 1..]].concat().join(" ");
            let tree: String = text.split(';').next().unwrap().split_whitespace().collect();
            let mut parent = self.module.clone();
            parent.pop();
            let (base, tree) = if let Some(rest) = tree.strip_prefix("crate::") {
                (Vec::new(), rest)
            } else if let Some(rest) = tree.strip_prefix("super::super::") {
                parent.pop();
                (parent, rest)
            } else if let Some(rest) = tree.strip_prefix("super::") {
                (parent, rest)
            } else {
                continue;
            };
            paths(tree, &base, &mut found);
        }
        found
    }
}

/// Returns where a string literal ends. A raw one has a number of hashes and no escapes.
fn end_of_literal(text: &[char], begin: usize, hashes: Option<usize>) -> usize {
    let mut at = begin;
    while at < text.len() {
        match text[at] {
            '\\' if hashes.is_none() => at += 1,
            '"' => {
                let hashes = hashes.unwrap_or(0);
                if text[at + 1..].iter().take(hashes).filter(|letter| **letter == '#').count()
                    == hashes
                {
                    return at;
                }
            }
            _ => {}
        }
        at += 1;
    }
    text.len()
}

fn is_sqlstate(literal: &str) -> bool {
    literal.len() == 5
        && literal.chars().all(|letter| letter.is_ascii_digit() || letter.is_ascii_uppercase())
        && SQLSTATE_CLASSES.iter().any(|class| literal.starts_with(class))
}

/// Returns the texts of the files with an ending in a folder, and below it.
fn texts(folder: &Path, ending: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(texts(&path, ending));
        } else if path.extension().is_some_and(|extension| extension == ending) {
            found.push(fs::read_to_string(path).unwrap());
        }
    }
    found
}

/// Returns the texts of all migrations and of all functions of the schema.
fn sql_texts() -> Vec<String> {
    let mut found = texts(&root().join("migrations"), "sql");
    for folder in fs::read_dir(root().join("host")).unwrap() {
        found.extend(texts(&folder.unwrap().path().join("sql"), "sql"));
    }
    found
}

/// Returns the SQL functions that texts define, and how often each is defined.
fn sql_functions(texts: &[String]) -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    for line in texts.iter().flat_map(|text| text.lines()) {
        let Some(rest) = line.trim_start().strip_prefix("CREATE ") else { continue };
        let rest = rest.strip_prefix("OR REPLACE ").unwrap_or(rest);
        if let Some((name, _)) =
            rest.strip_prefix("FUNCTION ").and_then(|rest| rest.split_once('('))
        {
            *found.entry(name.trim().to_owned()).or_default() += 1;
        }
    }
    found
}

/// Returns the breaches of a page that names SQL functions: those that do not exist, and those that
/// no code of the host calls. `code` is the text of the host.
fn function_breaches(path: &str, page: &str, sql: &[String], code: &str) -> Vec<String> {
    let functions = sql_functions(sql);
    let is_other = |name: &str| {
        ["TABLE", "VIEW", "SEQUENCE"].iter().any(|kind| {
            sql.iter().any(|text| {
                let defined = format!("CREATE {kind} {name}");
                text.lines().any(|line| {
                    line.strip_prefix(&defined).is_some_and(|rest| !rest.starts_with(is_of_name))
                })
            })
        })
    };
    let mut found = Vec::new();
    for named in page.split('`').skip(1).step_by(2) {
        let name = named.split('(').next().unwrap();
        let whole = if name.starts_with("oncebox.") || name.starts_with("oncebox_host.") {
            name.to_owned()
        } else if let Some(whole) =
            functions.keys().find(|whole| whole.split_once('.').is_some_and(|(_, it)| it == name))
        {
            whole.clone()
        } else {
            continue;
        };
        if !functions.contains_key(&whole) {
            if !is_other(&whole) {
                found.push(format!("SQL function that does not exist: {whole} in {path}"));
            }
            continue;
        }
        let last = whole.rsplit('.').next().unwrap();
        let is_called =
            code.contains(&format!("{whole}(")) || code.contains(&format!("host_call!(\"{last}\""));
        if !is_called {
            found.push(format!("SQL function that no code calls: {whole} in {path}"));
        }
    }
    found
}

fn is_of_name(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_'
}

/// Adds the paths of a tree such as `a::{b, c::d}`.
fn paths(tree: &str, base: &[String], found: &mut BTreeSet<Vec<String>>) {
    if let Some(inner) = tree.strip_prefix('{').and_then(|tree| tree.strip_suffix('}')) {
        let (mut depth, mut begin) = (0, 0);
        for (at, letter) in inner.char_indices() {
            match letter {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    paths(&inner[begin..at], base, found);
                    begin = at + 1;
                }
                _ => {}
            }
        }
        paths(&inner[begin..], base, found);
    } else if let Some((first, rest)) = tree.split_once("::") {
        paths(rest, &[base, &[first.to_owned()]].concat(), found);
    } else if !tree.is_empty() {
        found.insert([base, &[tree.to_owned()]].concat());
    }
}

fn visible(line: &str) -> &str {
    let Some(rest) = line.strip_prefix("pub") else { return line };
    match rest.strip_prefix('(') {
        Some(rest) => rest.split_once(')').map_or(rest, |(_, rest)| rest.trim_start()),
        None => rest.trim_start(),
    }
}

fn word(text: &str) -> &str {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next().unwrap()
}

fn function_name(line: &str) -> Option<String> {
    let mut rest = visible(line.trim_start());
    for before in ["const ", "async ", "unsafe ", "extern \"C\" "] {
        rest = rest.strip_prefix(before).unwrap_or(rest);
    }
    rest.strip_prefix("fn ").map(|rest| word(rest).to_owned())
}

fn breaches() -> BTreeSet<String> {
    let sources = sources();
    let mut found = BTreeSet::new();
    let mut types: BTreeMap<(&str, String), Vec<&str>> = BTreeMap::new();
    for source in &sources {
        found.extend(source.literal_breaches());
        for name in source.types() {
            types.entry((&source.folder, name)).or_default().push(&source.path);
        }
        if source.lines.len() > FILE_LINES_MAX {
            found.insert(format!("long file: {}", source.path));
        }
        for (name, comment, length) in source.functions() {
            if length > FUNCTION_LINES_MAX {
                found.insert(format!("long function: {name} in {}", source.path));
            }
            if comment
                .is_some_and(|comment| RIDDLES.iter().any(|riddle| comment.starts_with(riddle)))
            {
                found.insert(format!("comment of a function: {name} in {}", source.path));
            }
        }
    }
    for ((folder, name), places) in types {
        if places.len() > 1 {
            found.insert(format!("type name used {} times: {name} in host/{folder}", places.len()));
        }
    }
    found.extend(circles(&sources));
    let sql = sql_texts();
    for (name, times) in sql_functions(&sql) {
        if times > 1 {
            found.insert(format!("SQL function defined {times} times: {name}"));
        }
    }
    let code: String =
        sources.iter().flat_map(|source| [source.lines.join("\n"), "\n".into()]).collect();
    for path in ["README.md", "host/ARCHITECTURE.md"] {
        let page = fs::read_to_string(root().join(path)).unwrap();
        found.extend(function_breaches(path, &page, &sql, &code));
    }
    found.extend(path_breaches(&fs::read_to_string(root().join("README.md")).unwrap()));
    let core = sources.iter().find(|source| source.path.ends_with("batch/process.rs")).unwrap();
    found.extend(core_breaches(core));
    found
}

/// The path of a message, where README's table of it names too many files of Rust, or none.
fn path_breaches(readme: &str) -> Option<String> {
    let mut sections = readme.split("\n## ");
    let section = sections.find(|section| section.starts_with("A message's path")).unwrap_or("");
    let rows = section.lines().filter(|line| line.starts_with('|'));
    let links =
        rows.flat_map(|row| row.split("](").skip(1)).filter_map(|link| link.split(')').next());
    let files: BTreeSet<_> = links.filter(|link| link.ends_with(".rs")).collect();
    let is_kept = (1..=PATH_FILES_MAX).contains(&files.len());
    (!is_kept).then(|| format!("path of a message: {} files of Rust", files.len()))
}

/// The core of the protocol, where the bodies of its two functions are too long, or one is not there.
fn core_breaches(core: &Source) -> Option<String> {
    let body = |name: &str| {
        let is_it = |line: &String| function_name(line).is_some_and(|found| found == name);
        let lines = core.lines.iter().skip_while(|line| !is_it(line));
        Some(lines.skip_while(|line| !line.ends_with('{')).position(|line| line == "    }")? - 1)
    };
    let lines = body("transact").zip(body("run")).map(|(transact, run)| transact + run);
    let is_kept = lines.is_some_and(|lines| lines <= CORE_LINES_MAX);
    (!is_kept).then(|| format!("core of the protocol: {lines:?} lines"))
}

/// The circles of imports that have too many files, as the crate and the number of files.
fn circles(sources: &[Source]) -> Vec<String> {
    let mut crates: BTreeMap<&str, Vec<&Source>> = BTreeMap::new();
    for source in sources {
        crates.entry(&source.folder).or_default().push(source);
    }
    let mut found = Vec::new();
    for (folder, files) in crates {
        let by_module: BTreeMap<&[String], usize> =
            files.iter().enumerate().map(|(at, file)| (&file.module[..], at)).collect();
        let edges: Vec<BTreeSet<usize>> = files
            .iter()
            .enumerate()
            .map(|(at, file)| {
                let imported = file.imports().into_iter().filter_map(|path| {
                    // The longest part of the path that is a file; the root only hands on.
                    (1..=path.len())
                        .rev()
                        .find_map(|length| by_module.get(&path[..length]).copied())
                });
                imported.filter(|to| *to != at).collect()
            })
            .collect();
        for circle in strongly_connected(&edges) {
            if circle.len() > CIRCLE_MAX {
                found.push(format!("circle of {} files: host/{folder}", circle.len()));
            }
        }
    }
    found
}

/// The sets of nodes that reach each other.
fn strongly_connected(edges: &[BTreeSet<usize>]) -> Vec<BTreeSet<usize>> {
    let reached: Vec<BTreeSet<usize>> = (0..edges.len())
        .map(|from| {
            let (mut seen, mut left) = (BTreeSet::new(), vec![from]);
            while let Some(node) = left.pop() {
                left.extend(edges[node].iter().copied().filter(|next| seen.insert(*next)));
            }
            seen
        })
        .collect();
    let mut found: Vec<BTreeSet<usize>> = Vec::new();
    for node in 0..edges.len() {
        if !found.iter().any(|set| set.contains(&node)) && reached[node].contains(&node) {
            found.push(
                reached[node].iter().copied().filter(|to| reached[*to].contains(&node)).collect(),
            );
        }
    }
    found
}

#[test]
fn the_rules_of_the_house_are_kept() {
    let known_file = root().join("tests/tests/surface/tidy/known.txt");
    let known: BTreeSet<String> =
        fs::read_to_string(&known_file).unwrap().lines().map(str::to_owned).collect();
    let found = breaches();
    let new: Vec<_> = found.difference(&known).collect();
    let mended: Vec<_> = known.difference(&found).collect();
    assert!(new.is_empty(), "breaches of the rules of the house: {new:#?}");
    assert!(mended.is_empty(), "no breaches any more, to be taken out of known.txt: {mended:#?}");
}

/// What could go wrong: a page sends its reader to a file that is not there.
#[test]
fn every_path_that_the_first_pages_name_exists() {
    let root = root();
    let mut missing = Vec::new();
    for page in ["README.md", "host/ARCHITECTURE.md", "docs/guarantees.md"] {
        let text = fs::read_to_string(root.join(page)).unwrap();
        let folder = root.join(page).parent().unwrap().to_owned();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let path = link.split('#').next().unwrap();
            if !path.is_empty() && !path.contains("://") && !folder.join(path).exists() {
                missing.push(format!("{page}: {link}"));
            }
        }
        for named in text.split('`').skip(1).step_by(2).filter(|named| is_path(named)) {
            let places = [root.join(named), folder.join(named)];
            if !places.iter().any(|place| place.exists()) {
                missing.push(format!("{page}: `{named}`"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

/// Returns whether a text in backticks is the path of a file of the project.
fn is_path(text: &str) -> bool {
    let first = [
        "host/",
        "tests/",
        "docs/",
        "migrations/",
        "scripts/",
        "wit/",
        "bench/",
        "guest-examples/",
    ];
    first.iter().any(|first| text.starts_with(first))
        && text.chars().all(|letter| letter.is_ascii_alphanumeric() || "/._-".contains(letter))
}

/// What could go wrong: a rule sees nothing. Each is shown a breach.
#[test]
fn each_rule_sees_its_breach() {
    let source = |module: &[&str], text: &str| Source {
        folder: "planted".to_owned(),
        path: format!("host/planted/src/{}.rs", module.join("/")),
        module: module.iter().map(|part| (*part).to_owned()).collect(),
        lines: without_tests(text),
    };
    let tested = source(
        &["t"],
        "#[cfg(test)]\nmod tests;\nstruct First;\n#[cfg(test)]\n#[path = \"x\"]\nmod more {\n    \
         struct Own;\n}\nstruct Last;",
    );
    assert_eq!(tested.types().collect::<Vec<_>>(), ["First", "Last"]);
    let two = source(&["a"], "pub(crate) struct Place {\n}\n\nenum Kind {}\npub trait Place2 {}");
    assert_eq!(two.types().collect::<Vec<_>>(), ["Place", "Kind", "Place2"]);

    let long = format!(
        "/// Whether it is.\n#[inline]\npub async fn long() {{\n{}}}",
        "    step();\n".repeat(80)
    );
    let long = source(&["b"], &long);
    assert_eq!(long.functions(), [("long".to_owned(), Some("Whether it is."), 82)]);

    let ring: Vec<_> = ["a", "b", "c", "d"]
        .iter()
        .zip([
            "use crate::{\n    b::B,\n    x::y::Z,\n};",
            "use super::c::C;",
            "use crate::d;",
            "pub use crate::a::{A, self};",
        ])
        .map(|(name, text)| source(&[name], &format!("//! Text.\n{text}")))
        .collect();
    assert_eq!(circles(&ring), ["circle of 4 files: host/planted"]);
    assert!(circles(&ring[..3]).is_empty());

    let literals = source(
        &["l"],
        "// \"parked\" is no literal, nor is '\"'\nlet a = (\"40P01\", '\\'', \"it is \\\"parked\\\"\");\n\
         let b: &'static str = r#\"a \"waiting\" one\"#;\nlet c = \"SELECT 'parked'\";\nlet d = (\"54321\", \
         \"discarded\");",
    );
    let texts = ["40P01", "it is \\\"parked\\\"", "a \"waiting\" one", "SELECT 'parked'", "54321"];
    assert_eq!(literals.literals()[..5], texts);
    let breaches = [
        "SQLSTATE literal: 40P01 in host/planted/src/l.rs",
        "status literal: host/planted/src/l.rs",
    ];
    assert_eq!(literals.literal_breaches().into_iter().collect::<Vec<_>>(), breaches);

    let path = |files: usize| {
        let links: String =
            (0..files).map(|file| format!("[f](f{file}.rs), [s](s.sql) ")).collect();
        path_breaches(&format!("# A\n\n## A message's path\n\n| {links} |\n\n[f](x.rs)\n\n## B"))
    };
    assert_eq!((path(18), path(0).is_some()), (None, true));
    assert_eq!(path(19).unwrap(), "path of a message: 19 files of Rust");
    let core = |run: usize| {
        let text = "    fn transact(\n        self,\n    ) {\n        a;\n    }\n    fn run() {\n{}    }\n";
        core_breaches(&source(&["c"], &text.replace("{}", &"        a;\n".repeat(run))))
    };
    assert_eq!(
        (core(29), core(30).unwrap()),
        (None, "core of the protocol: Some(31) lines".into())
    );
    assert!(core_breaches(&source(&["c"], "    fn run() {\n    }\n")).is_some());

    let avoided = "tx.execute(\"SET LOCAL \\\n enable_sort = off{}\").await?;";
    let jit = |rest| source(&["j"], &avoided.replace("{}", rest)).literal_breaches().len();
    assert_eq!((jit(""), jit("; SET LOCAL jit = off")), (1, 0));

    let sql = [
        "CREATE FUNCTION oncebox_host.claim(p_id text)\nCREATE TABLE oncebox.consumer (",
        "CREATE OR REPLACE FUNCTION oncebox_host.claim(p_id text)\nCREATE FUNCTION oncebox.release()",
    ]
    .map(str::to_owned);
    assert_eq!(sql_functions(&sql)["oncebox_host.claim"], 2);
    let page = "`claim`, `oncebox.consumer`, `oncebox.release`, `oncebox.consume`, `deploy`";
    let breaches = [
        "SQL function that no code calls: oncebox.release in a page",
        "SQL function that does not exist: oncebox.consume in a page",
    ];
    let code = "host_call!(\"claim\" { })";
    assert_eq!(function_breaches("a page", page, &sql, code), breaches);
    let code = "SELECT oncebox_host.claim($1), oncebox.release()";
    assert_eq!(function_breaches("a page", page, &sql, code), breaches[1..]);

    for (text, is) in [("host/inbox/src/lib.rs", true), ("tests/a b", false), ("inbox", false)] {
        assert_eq!(is_path(text), is, "{text}");
    }
}
