//! Lists the files of the Rust template, with the SDK that every such project carries, for
//! `src/new_project/templates.rs`.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

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
