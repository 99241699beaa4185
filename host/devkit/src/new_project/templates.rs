//! The files of new projects, inside the program. They are the examples themselves, in
//! `guest-examples/languages`, so that what the tests build is what an author gets. A Rust project
//! is `templates/rust` with a copy of the SDK.

use std::{borrow::Cow, io};

use crate::packed::{PackedFile, unpack};

/// A language that a handler can be written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    /// Rust.
    Rust,
    /// TypeScript.
    Typescript,
    /// JavaScript.
    Javascript,
    /// Python.
    Python,
    /// Go.
    Go,
    /// C.
    C,
}

/// A file's path in the project, and its content.
type File = (&'static str, &'static [u8]);

/// The same, where the content may have been unpacked.
type Content = (&'static str, Cow<'static, [u8]>);

/// Includes files that have one path in a folder and in the project.
macro_rules! files {
    ($dir:literal: $($path:literal),+ $(,)?) => {
        &[$(($path, include_bytes!(concat!("../../../../", $dir, "/", $path)))),+]
    };
}

/// Files that every project has.
const COMMON: &[File] = files!("guest-examples/languages": "schema.sql", "messages.jsonl");
const GITIGNORE: &[u8] = include_bytes!("../../templates/gitignore");
const README: &str = include_str!("../../templates/README.md");

const RUST: &[PackedFile] = &include!(concat!(env!("OUT_DIR"), "/rust_template.rs"));
const TYPESCRIPT: &[File] = files!("guest-examples/languages/typescript":
    "build.sh", "contract.d.ts", "handler.ts", "oncebox.d.ts", "oncebox.js", "package.json", "tsconfig.json");
const JAVASCRIPT: &[File] = files!("guest-examples/languages/javascript":
    "build.sh", "contract.d.ts", "handler.js", "oncebox.d.ts", "oncebox.js", "package.json");
const PYTHON: &[File] = files!("guest-examples/languages/python": "app.py", "build.sh", "oncebox.py", "requirements.txt");
const C: &[File] = files!("guest-examples/languages/c":
    "bindings/handler.c", "bindings/handler.h", "bindings/handler_component_type.o", "build.sh", "handler.c", "json.c", "oncebox.c",
    "oncebox.h");
const GO: &[File] = files!("guest-examples/languages/go":
    "bindings/export_oncebox_handler_incoming_handler/handler.go",
    "bindings/oncebox_handler_config/empty.s", "bindings/oncebox_handler_config/wit_bindings.go",
    "bindings/oncebox_handler_context/empty.s", "bindings/oncebox_handler_context/wit_bindings.go",
    "bindings/oncebox_handler_incoming_handler/empty.s", "bindings/oncebox_handler_incoming_handler/wit_bindings.go",
    "bindings/oncebox_handler_log/empty.s", "bindings/oncebox_handler_log/wit_bindings.go",
    "bindings/oncebox_handler_sql/empty.s", "bindings/oncebox_handler_sql/wit_bindings.go",
    "bindings/oncebox_handler_types/empty.s", "bindings/oncebox_handler_types/wit_bindings.go",
    "bindings/wit_exports/wit_exports.go", "build.sh", "go.mod", "go.sum", "main.go", "oncebox/oncebox.go", "oncebox/sql.go");

impl Language {
    /// All languages.
    pub const ALL: [Self; 6] =
        [Self::Rust, Self::Typescript, Self::Javascript, Self::Python, Self::Go, Self::C];

    /// Returns the language's name, as a command line has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rust => "rust",
            Self::Typescript => "typescript",
            Self::Javascript => "javascript",
            Self::Python => "python",
            Self::Go => "go",
            Self::C => "c",
        }
    }

    /// Returns the files of the language, with their contents.
    fn files(self) -> io::Result<Vec<Content>> {
        let files = match self {
            Self::Rust => {
                return RUST.iter().map(|file| Ok((file.0, unpack(file)?.into()))).collect();
            }
            Self::Typescript => TYPESCRIPT,
            Self::Javascript => JAVASCRIPT,
            Self::Python => PYTHON,
            Self::Go => GO,
            Self::C => C,
        };
        Ok(files.iter().map(|(path, content)| (*path, Cow::Borrowed(*content))).collect())
    }

    /// Returns the notes about the language, for the project's README.
    fn notes(self) -> &'static str {
        match self {
            Self::Rust => include_str!("../../templates/notes/rust.md"),
            Self::Typescript => include_str!("../../templates/notes/typescript.md"),
            Self::Javascript => include_str!("../../templates/notes/javascript.md"),
            Self::Python => include_str!("../../templates/notes/python.md"),
            Self::Go => include_str!("../../templates/notes/go.md"),
            Self::C => include_str!("../../templates/notes/c.md"),
        }
    }

    /// Returns the file to open first.
    pub(crate) fn handler_file(self) -> &'static str {
        match self {
            Self::Rust => "src/lib.rs",
            Self::Typescript => "handler.ts",
            Self::Javascript => "handler.js",
            Self::Python => "app.py",
            Self::Go => "main.go",
            Self::C => "handler.c",
        }
    }
}

/// Returns the files of a project of this name, by their paths in it.
pub(super) fn project(language: Language, name: &str) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut files = language.files()?;
    for (path, content) in COMMON {
        // A template may bring tables and messages of its own.
        if files.iter().all(|(own, _)| own != path) {
            files.push((path, Cow::Borrowed(content)));
        }
    }
    let mut files: Vec<(String, Vec<u8>)> =
        files.into_iter().map(|(path, content)| (path.to_owned(), named(&content, name))).collect();
    files.extend(
        oncebox_runtime::WIT
            .iter()
            .map(|(file, text)| (format!("wit/{file}"), text.as_bytes().to_vec())),
    );
    files.push((".gitignore".to_owned(), GITIGNORE.to_vec()));
    let readme = README.replace("{{language}}", language.notes().trim_end());
    files.push(("README.md".to_owned(), named(readme.as_bytes(), name)));
    files.sort();
    Ok(files)
}

/// Puts a project's name into the content of a file. The examples are projects of the name
/// `order-placed`; templates have a gap where the name goes.
fn named(content: &[u8], name: &str) -> Vec<u8> {
    let crate_name = name.replace('-', "_");
    match std::str::from_utf8(content) {
        Ok(text) => text
            .replace("order-placed", name)
            .replace("{{name}}", name)
            .replace("{{crate}}", &crate_name)
            .into_bytes(),
        Err(_) => content.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    use super::*;

    /// Collects the sources below a folder, by their paths in it.
    fn sources(dir: &Path, below: &str, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(dir.join(below)).expect("a folder") {
            let name = entry.expect("an entry").file_name().into_string().expect("a name");
            let path = Path::new(below).join(&name).to_str().expect("a path").to_owned();
            let is_left_by_a_build =
                ["node_modules", ".venv", "__pycache__", "build", "wit"].contains(&name.as_str());
            if is_left_by_a_build || name.ends_with(".wasm") {
            } else if dir.join(&path).is_dir() {
                sources(dir, &path, found);
            } else {
                found.insert(path);
            }
        }
    }

    // A file that was added to an example must not be missing in every new project.
    #[test]
    fn every_file_of_an_example_is_written() {
        for language in Language::ALL.into_iter().filter(|language| *language != Language::Rust) {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("../../guest-examples/languages")
                .join(language.name());
            let mut sources_of_example = BTreeSet::new();
            sources(&dir, "", &mut sources_of_example);
            let own = language.files().expect("files that unpack");
            let known: BTreeSet<_> = own
                .iter()
                .map(|(path, _)| *path)
                .chain(COMMON.iter().map(|(path, _)| *path))
                .map(str::to_owned)
                .collect();
            assert_eq!(sources_of_example, known, "{language:?}");
            assert!(
                known.contains(language.handler_file()) && known.contains("build.sh"),
                "{language:?}"
            );
        }
    }

    #[test]
    fn nothing_of_the_examples_name_is_left() {
        for language in Language::ALL {
            for (path, content) in project(language, "my-handler").expect("files that unpack") {
                let text = String::from_utf8_lossy(&content);
                assert!(!text.contains("order-placed"), "{language:?}: `{path}`");
                assert!(
                    !text.contains("{{name}}")
                        && !text.contains("{{crate}}")
                        && !text.contains("{{language}}"),
                    "{language:?}: `{path}`"
                );
            }
        }
    }
}
