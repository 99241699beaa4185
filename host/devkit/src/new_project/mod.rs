//! `oncebox new`: a project that builds, with messages to try it on.

mod templates;

use std::{
    env,
    fs::OpenOptions,
    io::{ErrorKind, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use serde_json::json;

pub use templates::Language;

use crate::output;

/// Options of `oncebox new`.
pub struct NewOptions {
    /// Name of the handler.
    pub name: String,
    /// Language of the handler.
    pub lang: Language,
    /// Folder to write to; none for one of the handler's name.
    pub dir: Option<PathBuf>,
}

/// Returns the name, if a handler, a folder and a package can all have it.
///
/// # Errors
/// One of them cannot.
pub fn name(text: &str) -> Result<String, String> {
    let sound = text.starts_with(|c: char| c.is_ascii_lowercase())
        && text.len() <= 63
        && !text.ends_with('-')
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    if sound {
        Ok(text.to_owned())
    } else {
        Err("use a lower-case letter, then up to 62 of a-z, 0-9 and `-`".to_owned())
    }
}

/// Writes a project and prints the commands that follow.
pub fn run(args: NewOptions, json: bool) -> Result<()> {
    let dir = args.dir.unwrap_or_else(|| PathBuf::from(&args.name));
    check_is_free(&dir)?;
    let files = templates::project(args.lang, &args.name)?;
    for (path, content) in &files {
        write(&dir.join(path), content)?;
    }
    let commands = commands(&dir, &args.name);
    if json {
        let paths: Vec<_> = files.iter().map(|(path, _)| path).collect();
        return output::json(
            &json!({ "name": args.name, "dir": dir, "files": paths, "next": commands }),
        );
    }
    println!(
        "wrote {} files to `{}`; the handler is in `{}`",
        files.len(),
        dir.display(),
        args.lang.handler_file()
    );
    println!(
        "\nbuild it and try it on messages, then run it and, in another terminal in the same \
            folder, send them:\n"
    );
    for command in &commands {
        println!("  {command}");
    }
    Ok(())
}

/// Refuses a folder that is not empty, so that no file is written over.
fn check_is_free(dir: &Path) -> Result<()> {
    match std::fs::read_dir(dir).map(|mut entries| entries.next().is_none()) {
        Ok(true) => Ok(()),
        Ok(false) => bail!("`{}` is not empty; choose another `--dir`", dir.display()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => {
            Err(error).with_context(|| format!("failed to look into `{}`", dir.display()))
        }
    }
}

fn write(path: &Path, content: &[u8]) -> Result<()> {
    let failed = || format!("failed to write `{}`", path.display());
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)
            .with_context(|| format!("failed to create `{}`", parent.display()))?;
    }
    let mode =
        if path.extension().is_some_and(|extension| extension == "sh") { 0o755 } else { 0o644 };
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
        .with_context(failed)?;
    file.write_all(content).with_context(failed)
}

/// Returns the commands of the first hour, as a shell takes them.
fn commands(dir: &Path, name: &str) -> Vec<String> {
    let mut commands = Vec::new();
    if let Some(folder) = folder_to_add_to_path() {
        commands.push(format!("export PATH={}:\"$PATH\"", quoted(folder)));
    }
    commands.push(format!("cd {}", quoted(dir)));
    commands.push("./build.sh".to_owned());
    commands.push(format!("oncebox test {name}.wasm --message messages.jsonl --schema schema.sql"));
    commands.push(format!("oncebox dev order.placed={name}.wasm --schema schema.sql"));
    commands.push("oncebox send messages.jsonl".to_owned());
    commands.push("oncebox inbox list".to_owned());
    commands
}

/// Returns the folder of this program, if a shell would not find it.
fn folder_to_add_to_path() -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let is_found = env::split_paths(&path).any(|folder| folder.join("oncebox").is_file());
    if is_found { None } else { env::current_exe().ok()?.parent().map(Path::to_owned) }
}

/// Returns a path as one word of a shell.
pub(crate) fn quoted(path: impl AsRef<Path>) -> String {
    let text = path.as_ref().to_string_lossy();
    let is_plain = !text.is_empty()
        && !text.starts_with('-')
        && text.chars().all(|c| c.is_alphanumeric() || "/._-+".contains(c));
    if is_plain { text.into_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_folders_packages_and_handlers() {
        for sound in ["a", "order-placed", "v2"] {
            assert_eq!(name(sound).as_deref(), Ok(sound));
        }
        for bad in ["", "-a", "a-", "2a", "A", "a_b", "a.b", "../a", "a/b", &"a".repeat(64)] {
            assert!(name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn paths_are_one_word_for_a_shell() {
        for (path, word) in [
            ("a/b-c", "a/b-c"),
            ("my folder", "'my folder'"),
            ("it's", r"'it'\''s'"),
            ("-x", "'-x'"),
            ("a;b", "'a;b'"),
        ] {
            assert_eq!(quoted(Path::new(path)), word);
        }
    }
}
