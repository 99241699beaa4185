//! `oncebox erase`

use std::{
    fs::File,
    io::{BufRead, IsTerminal, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use oncebox_api::wire::{ErasureBody, ErasureProofBody, NewErasure};
use oncebox_devkit::{
    api::{Api, Refused, path},
    output,
};

/// Pause between two requests.
const PAUSE: Duration = Duration::from_millis(200);

#[derive(Args)]
pub(super) struct EraseArgs {
    /// The tenant
    #[arg(long)]
    tenant: String,
    /// The messages with this record key or ordering key, as text
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// The messages with this record key or ordering key, in hexadecimal digits
    #[arg(long, value_name = "DIGITS")]
    key_hex: Option<String>,
    /// The message with this id
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// Only this consumer
    #[arg(long)]
    consumer: Option<String>,
    /// Why: kept with each message and in the audit log
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// Write the proof to this file, which must not be there yet; by default to the standard output
    #[arg(long, value_name = "FILE")]
    proof: Option<PathBuf>,
    /// Do not ask at the terminal
    #[arg(long)]
    yes: bool,
    /// Wait for messages that workers hold, for so many seconds without progress
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    wait: u64,
}

/// Repeats the request until there is a proof. An erasure that is not finished goes on when the
/// command is repeated.
pub(super) async fn run(api: &Api, args: EraseArgs, json: bool) -> Result<()> {
    let selectors = [&args.key, &args.key_hex, &args.id];
    ensure!(
        selectors.into_iter().flatten().count() == 1,
        "say which messages: by one of `--id`, `--key` and `--key-hex`"
    );
    let file = args.proof.as_deref().map(ProofFile::create).transpose()?;
    match (confirmed(api, &args).await, file) {
        (Ok(proof), Some(file)) => {
            file.write(&proof)?;
            if json {
                return output::json(&proof);
            }
            println!("{}; the proof is in `{}`", summary(&proof), file.path.display());
            Ok(())
        }
        (Ok(proof), None) => {
            eprintln!("{}", summary(&proof));
            output::json(&proof)
        }
        (Err(error), file) => {
            file.into_iter().for_each(ProofFile::remove);
            Err(error)
        }
    }
}

async fn confirmed(api: &Api, args: &EraseArgs) -> Result<ErasureProofBody> {
    if !args.yes {
        ask(&args.tenant)?;
    }
    let EraseArgs { key, key_hex, id, consumer, reason, .. } = args;
    let request = NewErasure {
        reason: reason.clone(),
        message_id: id.clone(),
        key: key.clone(),
        key_hex: key_hex.clone(),
        consumer: consumer.clone(),
    };
    erase(api, args, &request).await
}

async fn erase(api: &Api, args: &EraseArgs, request: &NewErasure) -> Result<ErasureProofBody> {
    let route = path(&["tenants", &args.tenant, "erase"]);
    let wait = Duration::from_secs(args.wait);
    let (mut last, mut moved_at) = (Option::<ErasureBody>::None, Instant::now());
    loop {
        let (mut has_moved, mut late) = (false, None);
        match api.post::<ErasureBody>(&route, request).await {
            Ok(ErasureBody { proof: Some(proof), .. }) => return Ok(proof),
            Ok(answer) => {
                let done = |body: &ErasureBody| (body.erased, body.looked_at);
                has_moved = match &last {
                    Some(last) => done(last) != done(&answer),
                    None => answer.in_flight == 0,
                };
                if last.as_ref() != Some(&answer) {
                    eprintln!("{}", shown(&answer));
                }
                last = Some(answer);
            }
            // A vacuum of a large table outlasts a request, and goes on without it.
            Err(error) if last.is_some() && is_timeout(&error) => late = Some(error),
            Err(error) => return Err(error),
        }
        if has_moved {
            moved_at = Instant::now();
        } else if moved_at.elapsed() >= wait {
            bail!("{}; repeat the command to go on with it", unfinished(last.as_ref(), late));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Returns whether a request took too long. What it began goes on.
fn is_timeout(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Refused>().is_some_and(|refused| refused.code == "timeout")
}

/// Returns the text for an erasure that does not go on, with the error of the last request.
fn unfinished(last: Option<&ErasureBody>, late: Option<anyhow::Error>) -> String {
    let shown = last.map(shown).unwrap_or_default();
    let late = late.map_or_else(String::new, |error| format!("; the last request: {error:#}"));
    format!("the erasure is not finished: {shown}{late}")
}

/// Returns the progress, as a line.
fn shown(progress: &ErasureBody) -> String {
    let ErasureBody { erased, looked_at, waits_for, .. } = progress;
    let (erased, looked_at) = (messages(*erased), output::number(*looked_at));
    let waits = waits_for.as_ref().map_or_else(String::new, |what| format!(", waiting for {what}"));
    format!("{erased} erased, {looked_at} looked at{waits}")
}

/// Returns what the erasure came to, as a line.
fn summary(proof: &ErasureProofBody) -> String {
    let erased: i64 = proof.erased.iter().map(|count| count.messages).sum();
    let mut summary = match (erased, proof.already_erased) {
        (0, 0) if proof.archived > 0 => "nothing is left to erase in the inbox".to_owned(),
        (0, 0) => "no message matches; nothing was erased".to_owned(),
        (0, before) => format!("nothing is left to erase: {} erased before", messages(before)),
        (erased, 0) => format!("{} erased", messages(erased)),
        (erased, before) => format!("{} erased, {} before", messages(erased), messages(before)),
    };
    if proof.archived > 0 {
        summary += &format!("; {} erased in the archive", messages(proof.archived));
    }
    if !proof.not_vacuumed.is_empty() {
        summary += &format!("; not vacuumed: {}", proof.not_vacuumed.join("; "));
    }
    summary
}

fn messages(count: i64) -> String {
    if count == 1 { "1 message".to_owned() } else { format!("{} messages", output::number(count)) }
}

/// The file of a proof, which is there before anything is erased.
struct ProofFile {
    path: PathBuf,
    file: File,
}

impl ProofFile {
    fn create(path: &Path) -> Result<Self> {
        let file = File::create_new(path).with_context(|| {
            format!("failed to make the file of the proof, `{}`", path.display())
        })?;
        Ok(Self { path: path.to_owned(), file })
    }

    fn write(&self, proof: &ErasureProofBody) -> Result<()> {
        let text = serde_json::to_string_pretty(proof)?;
        let written = writeln!(&self.file, "{text}").and_then(|()| self.file.sync_all());
        written.with_context(|| {
            format!(
                "the messages are erased, and the proof could not be written to `{}`: {text}",
                self.path.display()
            )
        })
    }

    /// Removes the file of an erasure without a proof.
    fn remove(self) {
        let _ = std::fs::remove_file(&self.path); // it is empty
    }
}

/// Asks the operator at the terminal.
fn ask(tenant: &str) -> Result<()> {
    if !std::io::stdin().is_terminal() {
        bail!(
            "the payloads of these messages of tenant `{tenant}` would be erased for good; say \
                `--yes` if that is meant"
        );
    }
    eprint!(
        "the payloads of these messages of tenant `{tenant}` will be erased for good, and those \
            that did not run never will; type the tenant's name: "
    );
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    ensure!(answer.trim() == tenant, "that is not its name; nothing was erased");
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(code: &str) -> anyhow::Error {
        let body = json!({ "status": 503, "code": code, "detail": "what the host says" });
        serde_json::from_value::<Refused>(body).expect("a refusal").into()
    }

    // What could go wrong: a file of the archive that is missing is tried again for a minute, and
    // the operator reads only that the erasure is not finished.
    #[test]
    fn only_a_request_that_took_too_long_is_repeated() {
        assert!(is_timeout(&refused("timeout")));
        for code in ["unavailable", "conflict", ""] {
            assert!(!is_timeout(&refused(code)), "{code}");
        }
        assert!(!is_timeout(&anyhow::anyhow!("the server was not reached")));
        let text = unfinished(None, Some(refused("timeout")));
        assert_eq!(text, "the erasure is not finished: ; the last request: what the host says");
    }
}
