//! The benchmark's variants do what they are measured for: each applies every message once, and
//! those that send have one record of each on the broker. Nothing is timed here.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

/// What could go wrong: a variant that was fast because it did nothing, or did it twice; or one that
/// sends, whose records are lost or there twice.
#[test]
fn every_variant_of_the_benchmark_has_the_right_effects() -> Result<()> {
    let programs = programs()?;
    let mut bench = std::process::Command::new(programs.join("bench"));
    bench.args([
        "--smoke",
        "--variants",
        "a,b,c,c2,c3,d,d64,e,f",
        "--parts",
        "throughput,outgoing",
    ]);
    bench.args(["--seconds", "0.1", "--timers", "1000", "--bin"]).arg(&programs);
    let output = bench.output()?;
    let (stdout, stderr) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "the benchmark failed:\n{stderr}");
    // (f) needs what bench.sh installs with npm, (a) a client program of PostgreSQL; the others are
    // ours.
    let left_out = stderr.lines().filter(|line| line.contains("is left out")).count();
    // A run at full speed and one at half load, of the host and by hand, and one with timers.
    let expected = format!(
        "the effects of {} variants are right\n5 runs sent each outgoing message once",
        9 - left_out
    );
    ensure!(stdout.trim() == expected && left_out <= 2, "it says:\n{stdout}{stderr}");
    Ok(())
}

/// The programs that cargo builds beside the tests.
fn programs() -> Result<PathBuf> {
    let own = std::env::current_exe().context("failed to find the running program")?;
    let found = own.ancestors().skip(1).take(2).find(|dir| {
        ["bench", "bench-consumer", "oncebox"].iter().all(|name| dir.join(name).is_file())
    });
    Ok(found
        .context("the benchmark's programs are missing; run `cargo build --workspace --bins`")?
        .to_owned())
}
