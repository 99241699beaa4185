//! Lists the files of the Rust template, with the SDK that every such project carries, for
//! `src/new_project/templates.rs`, and compresses those of the demo for `src/demo/files.rs`.

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
    let mut files = Vec::new();
    list(&here.join("templates/rust"), "", &mut files);
    list(&here.join("../../guest-examples/guest"), "oncebox-guest/", &mut files);
    files.sort();
    let mut list = String::from("&[");
    for (name, path) in files {
        let _ = write!(list, "({name:?}, include_bytes!({path:?}).as_slice()),"); // writing to a string cannot fail
    }
    list.push(']');
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets it"));
    fs::write(out.join("rust_template.rs"), list).expect("the folder is cargo's own");
    compress_demo(&here.join("../../guest-examples"), &out);
}

/// Writes a compressed copy of each of the demo's files, and their list.
fn compress_demo(examples: &Path, out: &Path) {
    let mut list = String::from("[");
    for (nth, name) in DEMO.into_iter().enumerate() {
        let (from, to) = (examples.join(name), out.join(format!("demo-{nth}.gz")));
        println!("cargo::rerun-if-changed={}", from.display());
        let mut content = File::open(&from)
            .unwrap_or_else(|error| panic!("failed to read `{}`: {error}", from.display()));
        let packed = File::create(&to).expect("the folder is cargo's own");
        let mut encoder = GzEncoder::new(packed, Compression::best());
        io::copy(&mut content, &mut encoder).expect("both files are open");
        encoder.finish().expect("the file is open");
        let _ = write!(list, "({name:?}, include_bytes!({to:?}).as_slice()),"); // writing to a string cannot fail
    }
    list.push(']');
    fs::write(out.join("demo_files.rs"), list).expect("the folder is cargo's own");
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
