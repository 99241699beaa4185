//! Compresses the files of the Rust template, with the SDK that every such project carries, for
//! `src/new_project/templates.rs`, and those of the demo for `src/demo/files.rs`.

use std::{
    fmt::Write as _,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use flate2::{Compression, write::GzEncoder};

/// Files of `guest-examples` that the demo needs; `guest-examples/github-demo.toml` names all but
/// the first.
const DEMO: [&str; 8] = [
    "data/github-webhooks.jsonl",
    "github-schema.sql",
    "components/github-push.wasm",
    "components/github-issues.wasm",
    "components/github-pull-requests.wasm",
    "components/github-stars.wasm",
    "components/github-comments.wasm",
    "components/github-audit.wasm",
];

fn main() {
    let here = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets it"));
    let mut template = Vec::new();
    list(&here.join("templates/rust"), "", &mut template);
    list(&here.join("../../guest-examples/guest"), "oncebox-guest/", &mut template);
    template.sort();
    compress("rust_template", &template, &out);
    let of_demo = |name: &str| (name.to_owned(), here.join("../../guest-examples").join(name));
    compress("demo_files", &DEMO.map(of_demo), &out);
}

/// Writes a compressed copy of each file, and the list of their names and contents, as Rust.
fn compress(name: &str, files: &[(String, PathBuf)], out: &Path) {
    let mut list = String::from("[");
    for (nth, (file, from)) in files.iter().enumerate() {
        println!("cargo::rerun-if-changed={}", from.display());
        let mut content = File::open(from)
            .unwrap_or_else(|error| panic!("failed to read `{}`: {error}", from.display()));
        let to = out.join(format!("{name}-{nth}.gz"));
        let packed = File::create(&to).expect("the folder is cargo's own");
        let mut encoder = GzEncoder::new(packed, Compression::best());
        io::copy(&mut content, &mut encoder).expect("both files are open");
        encoder.finish().expect("the file is open");
        let _ = write!(list, "({file:?}, include_bytes!({to:?}).as_slice()),"); // writing to a string cannot fail
    }
    list.push(']');
    fs::write(out.join(format!("{name}.rs")), list).expect("the folder is cargo's own");
}

/// Files below a folder, by their names in a project.
fn list(dir: &Path, prefix: &str, files: &mut Vec<(String, PathBuf)>) {
    println!("cargo::rerun-if-changed={}", dir.display());
    let entries = fs::read_dir(dir)
        .unwrap_or_else(|error| panic!("failed to read `{}`: {error}", dir.display()));
    for entry in entries {
        let path = entry.expect("the folder was opened").path();
        let name = path
            .file_name()
            .expect("an entry has a name")
            .to_str()
            .expect("sources have plain names")
            .to_owned();
        // What cargo leaves where somebody built in place.
        if ["target", "Cargo.lock"].contains(&name.as_str()) {
            continue;
        }
        match path.is_dir() {
            true => list(&path, &format!("{prefix}{name}/"), files),
            false => files.push((
                format!("{prefix}{}", name.strip_suffix(".template").unwrap_or(&name)),
                path,
            )),
        }
    }
}
