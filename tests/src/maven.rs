//! What the tests run that comes from Maven: fetched on first use, and again when the `pom.xml`
//! that names it changes.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::services::target_dir;

/// The folder of `target` that a goal of a `pom.xml` of the tests fills, filled unless that very
/// file did it already: a copy of it is kept there as the last step. `otherwise` says what to do
/// where there is no Maven.
pub(crate) fn fetched(pom: &str, goal: &str, folder: &str, otherwise: &str) -> Result<PathBuf> {
    let pom = Path::new(env!("CARGO_MANIFEST_DIR")).join(pom);
    let wanted = fs::read(&pom).with_context(|| format!("failed to read `{}`", pom.display()))?;
    let dir = target_dir().join(folder);
    fs::create_dir_all(target_dir()).context("failed to create `target`")?;
    let lock =
        File::create(dir.with_added_extension("lock")).context("failed to create a lock file")?;
    lock.lock()
        .with_context(|| format!("failed to wait for another process that fetches `{folder}`"))?;
    let noted = dir.join("pom.xml");
    if fs::read(&noted).is_ok_and(|found| found == wanted) {
        return Ok(dir);
    }
    let _ = fs::remove_dir_all(&dir); // another version must not mix with this one
    let mut maven = Command::new("mvn");
    maven.args(["-q", "-B", goal, "-f"]).arg(&pom).stdin(Stdio::null());
    let output = maven.output().with_context(|| format!("failed to run `mvn`; {otherwise}"))?;
    ensure!(
        output.status.success(),
        "Maven failed to fetch `{folder}`:\n{}",
        String::from_utf8_lossy(&output.stdout)
    );
    fs::write(&noted, wanted)
        .with_context(|| format!("failed to note what `{folder}` was fetched by"))?;
    Ok(dir)
}

/// Java, of the machine or of JAVA_HOME.
pub(crate) fn java() -> Command {
    let home = std::env::var_os("JAVA_HOME").map(|home| Path::new(&home).join("bin/java"));
    let mut java = Command::new(home.unwrap_or_else(|| "java".into()));
    java.args(["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]).stdin(Stdio::null());
    java
}
