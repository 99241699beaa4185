//! The guest SDK keeps its promises to the author of a handler: its harness follows the host's
//! rules, and a new project of the Rust template passes its tests and builds.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::Command,
};

use oncebox_tests::{
    postgres::{create_database, drop_database},
    services::target_dir,
    temp_dir::TempDir,
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// Cargo in another workspace, with a database to test on or none. Its artifacts go to the folder
/// of the guests, where most of them are already.
fn cargo(dir: &Path, arguments: &[&str], database_url: Option<&str>) -> String {
    let mut command = Command::new(env!("CARGO"));
    command
        .current_dir(dir)
        .args(arguments)
        .arg("--target-dir")
        .arg(root().join("guest-examples/target"));
    // Nobody debugs these programs, and each is built once.
    command.env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_INCREMENTAL", "0");
    command
        .env_remove("ONCEBOX_TEST_DATABASE_URL")
        .env("DATABASE_URL", database_url.unwrap_or_default());
    // What it says and what its tests say, in their order.
    let (mut printed, writer) = std::io::pipe().unwrap();
    command.stdout(writer.try_clone().unwrap()).stderr(writer);
    let mut running = command.spawn().unwrap();
    drop(command);
    let mut text = Vec::new();
    printed.read_to_end(&mut text).unwrap();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(running.wait().unwrap().success(), "cargo {arguments:?}:\n{text}");
    text
}

/// What could go wrong: a handler passes under the SDK's harness, or builds on an old contract, and
/// fails on the host.
#[tokio::test]
async fn the_sdk_and_the_examples_pass_their_own_tests() {
    let name = format!("guest_sdk_{}", std::process::id());
    let url = create_database(&name).await.unwrap();
    let said = cargo(
        &root().join("guest-examples"),
        &["test", "--locked", "--workspace", "--features", "oncebox-guest/test"],
        Some(&url),
    );
    // `scripts/requirements.py` reads there which of them ran.
    fs::write(target_dir().join("guest-tests.log"), said).unwrap();
    drop_database(&name).await.unwrap();
}

/// What could go wrong: the harness allows a statement, or reads a number, that the host does not.
#[test]
fn the_harness_has_the_hosts_own_rules() {
    for file in ["statement.rs", "numeric.rs"] {
        let host = fs::read_to_string(root().join("host/runtime/src/host/sql").join(file)).unwrap();
        let harness =
            fs::read_to_string(root().join("guest-examples/guest/src/test").join(file)).unwrap();
        assert!(
            host == harness,
            "`guest/src/test/{file}` is not the host's; copy it from `host/runtime/src/host/sql`"
        );
    }
}

/// What could go wrong: what `oncebox new --lang rust` writes does not compile, or its tests fail.
/// They find their database by themselves.
#[test]
fn a_new_rust_project_passes_its_tests() {
    let folder = TempDir::new("guest-sdk");
    let project = folder.path().join("my-handler");
    copy(&root().join("host/devkit/templates/rust"), &project);
    copy(&root().join("guest-examples/guest"), &project.join("oncebox-guest"));
    // The versions that are built already.
    fs::copy(root().join("guest-examples/Cargo.lock"), project.join("Cargo.lock")).unwrap();
    cargo(&project, &["test"], None);
}

/// A folder's files, with the names in them filled in.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() {
            copy(&path, &to.join(name));
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let text = text.replace("{{name}}", "my-handler").replace("{{crate}}", "my_handler");
        fs::write(to.join(name.strip_suffix(".template").unwrap_or(name)), text).unwrap();
    }
}
