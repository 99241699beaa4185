//! The console in a real browser, over a host that runs. What could go wrong: a person finds no way
//! from the first page to the cure, with a mouse, with a keyboard alone or without JavaScript; a
//! page cannot be read on a small screen, enlarged, in one of the themes or by a screen reader; a
//! page needs what its own policy refuses.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use oncebox_tests::host;
use tokio::{process::Command, time::timeout};

/// How long the whole may take, on a machine that does other things as well.
const PATIENCE: Duration = Duration::from_secs(2_400);

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Installs what drives the browser, once.
async fn tools(target: &Path) -> PathBuf {
    let (tools, package) =
        (target.join("browser-tools"), root().join("tests/console/package.json"));
    let wanted = std::fs::read(&package).unwrap();
    let installed = tools.join("installed.json");
    if std::fs::read(&installed).ok().as_ref() != Some(&wanted) {
        std::fs::create_dir_all(&tools).unwrap();
        std::fs::write(tools.join("package.json"), &wanted).unwrap();
        let npm = Command::new("npm")
            .args(["install", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error"])
            .arg("--prefix")
            .arg(&tools)
            .status();
        assert!(npm.await.expect("npm").success(), "npm install in {}", tools.display());
        std::fs::write(installed, wanted).unwrap();
    }
    tools
}

#[tokio::test]
async fn every_incident_is_cured_by_mouse_by_keys_and_without_javascript() {
    let program = host::program().unwrap();
    let target = program.ancestors().nth(2).unwrap();
    let tools = tools(target).await;
    let folder = target.join("test-browser");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let sample = root().join("docs/samples/cures");
    for file in std::fs::read_dir(&sample).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), folder.join(file.file_name())).unwrap();
    }
    for (file, name) in [
        ("components/inventory-reservation.wasm", "reservations.wasm"),
        ("components/order-events.wasm", "sales.wasm"),
        ("order-events/schema.sql", "sales.sql"),
    ] {
        std::fs::copy(root().join("guest-examples").join(file), folder.join(name)).unwrap();
    }
    let run = Command::new("node")
        .arg(root().join("tests/console/run.mjs"))
        .args([&program, &folder, &folder.join("screenshots")])
        .env("ONCEBOX_BROWSER_TOOLS", tools)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let run = timeout(PATIENCE, run).await.expect("it ends").expect("node");
    let said = String::from_utf8_lossy(&run.stdout);
    println!("{said}");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    for visitor in ["mouse", "keys", "plain", "typed"] {
        let cured = said.matches(&format!("{visitor}: cured ")).count();
        assert_eq!(cured, 20, "{visitor}: {said}");
    }
    // S0-024: its page shows what the handler answered.
    assert!(said.contains("mouse: cured a poison message"), "{said}");
    let lasts = [
        "every key leads where it says",
        "a session begins and ends",
        "people of a provider sign in",
    ];
    for last in lasts {
        assert!(said.contains(last), "{last}: {said}");
    }
}
