//! `oncebox endpoint …`

use std::{
    collections::BTreeMap,
    io::Read,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand};
use oncebox_api::wire::{
    EndpointBody, EndpointChangeBody, EndpointRotationBody, EndpointTestBody, NewEndpointBody,
    NewRotation, OutgoingRowBody,
};
use oncebox_devkit::{
    api::{Api, path, with_query},
    output,
};
use serde_json::json;

use super::inbox::members;

#[derive(Subcommand)]
pub(super) enum EndpointCommand {
    /// Give the tenant an endpoint, or change all of its settings
    Set(Box<EndpointSetArgs>),
    /// List the endpoints of the tenant
    List {
        /// The tenant
        #[arg(long)]
        tenant: String,
    },
    /// Show an endpoint, without its secrets
    Show(NamedArgs),
    /// Remove an endpoint with its secrets; messages that are still to be sent to it are parked
    Remove(NamedArgs),
    /// Begin to sign with another secret beside the present one, or finish that
    Rotate {
        #[command(flatten)]
        named: NamedArgs,
        /// File with the other secret, or `-`; by default the host makes one and shows it once
        #[arg(long, value_name = "FILE", conflicts_with = "finish")]
        signing_secret_file: Option<PathBuf>,
        /// Sign with the present secret alone
        #[arg(long)]
        finish: bool,
    },
    /// Send a test message to an endpoint, once
    Test(NamedArgs),
}

/// Which endpoint.
#[derive(Args)]
pub(super) struct NamedArgs {
    /// The endpoint
    name: String,
    /// The tenant
    #[arg(long)]
    tenant: String,
}

#[derive(Args)]
pub(super) struct EndpointSetArgs {
    #[command(flatten)]
    named: NamedArgs,
    /// URL; one whose path is a secret is in a file
    #[arg(long, required_unless_present = "url_file")]
    url: Option<String>,
    /// File with the URL, or `-`
    #[arg(long, value_name = "FILE", conflicts_with = "url")]
    url_file: Option<PathBuf>,
    /// Method of the requests
    #[arg(long, default_value = "POST", value_parser = ["POST", "PUT", "PATCH", "DELETE"])]
    method: String,
    /// A header that each request has, several times for several
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    header: Vec<(String, String)>,
    /// A header whose value is in a file, or `-`, several times for several
    #[arg(long, value_name = "NAME=FILE", value_parser = pair)]
    secret_header: Vec<(String, String)>,
    /// File with the secret that requests are signed with, or `-`; by default the endpoint keeps
    /// what it has
    #[arg(long, value_name = "FILE", conflicts_with = "unsigned")]
    signing_secret_file: Option<PathBuf>,
    /// Requests have no signature
    #[arg(long)]
    unsigned: bool,
    /// Longest time for DNS, connection and TLS, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 5_000)]
    connect_timeout_ms: u32,
    /// Longest time for all of a request, milliseconds, at most 300000
    #[arg(long, value_name = "MS", default_value_t = 15_000)]
    timeout_ms: u32,
    /// Requests a second of one host; by default as many as there are
    #[arg(long, value_name = "N")]
    requests_per_second: Option<u32>,
    /// Requests of one host at a time, 1 to 100
    #[arg(long, value_name = "N", default_value_t = 8)]
    requests_max: u32,
    /// Failures in a row after which a host's circuit breaker opens
    #[arg(long, value_name = "N", default_value_t = 5)]
    failures_max: u32,
    /// First pause of an open breaker, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 5_000)]
    pause_ms: u32,
    /// What becomes of answers
    #[arg(long, default_value = "none", value_parser = ["none", "stored", "delivered"])]
    answer: String,
    /// Consumer that gets delivered answers; by default the one that emitted
    #[arg(long, value_name = "CONSUMER")]
    answer_to: Option<String>,
    /// Event type of delivered answers; by default that of the message with `.answered` behind it
    #[arg(long, value_name = "TYPE")]
    answer_event_type: Option<String>,
    /// The receiver recognises a repeated request by its `Idempotency-Key`
    #[arg(long)]
    receiver_deduplicates: bool,
    /// Who accepts that the receiver may act twice on a request
    #[arg(
        long,
        value_name = "OWNER",
        requires = "because",
        conflicts_with = "receiver_deduplicates"
    )]
    duplicates_accepted_by: Option<String>,
    /// Why that does no harm
    #[arg(long, value_name = "TEXT", requires = "duplicates_accepted_by")]
    because: Option<String>,
    /// Only say what would change
    #[arg(long)]
    dry_run: bool,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("there is no `=` in it")?;
    Ok((name.trim().to_owned(), value.to_owned()))
}

pub(super) async fn run(api: &Api, command: EndpointCommand, as_json: bool) -> Result<()> {
    match command {
        EndpointCommand::Set(args) => set(api, *args, as_json).await,
        EndpointCommand::List { tenant } => {
            let all = of_tenant(api, &tenant).await?;
            if as_json { output::json(&all) } else { list(&all) }
        }
        EndpointCommand::Show(named) => {
            let endpoint: EndpointBody = api.get(&named.path()).await?;
            if as_json {
                return output::json(&endpoint);
            }
            members(&serde_json::to_value(&endpoint)?);
            Ok(())
        }
        EndpointCommand::Remove(named) => {
            let removed: EndpointBody = api.delete(&named.path()).await?;
            if as_json {
                return output::json(&removed);
            }
            println!("tenant `{}` has no endpoint `{}` any more", named.tenant, named.name);
            Ok(())
        }
        EndpointCommand::Rotate { named, signing_secret_file, finish } => {
            let mut inputs = Inputs::default();
            let signing_secret =
                signing_secret_file.map(|path| inputs.secret(&path)).transpose()?;
            rotate(api, &named, NewRotation { signing_secret, finish }, as_json).await
        }
        EndpointCommand::Test(named) => test(api, &named, as_json).await,
    }
}

impl NamedArgs {
    fn path(&self) -> String {
        path(&["tenants", &self.tenant, "endpoints", &self.name])
    }

    fn path_of(&self, action: &str) -> String {
        path(&["tenants", &self.tenant, "endpoints", &self.name, action])
    }
}

/// Returns the endpoints of a tenant.
pub(super) async fn of_tenant(api: &Api, tenant: &str) -> Result<Vec<EndpointBody>> {
    api.get(&path(&["tenants", tenant, "endpoints"])).await
}

/// The files that hold secrets, of which one may be the standard input.
#[derive(Default)]
pub(super) struct Inputs {
    is_stdin_read: bool,
}

impl Inputs {
    /// Reads a secret. It is no argument, which every process can read.
    pub(super) fn secret(&mut self, path: &Path) -> Result<String> {
        let text = if path == Path::new("-") {
            ensure!(!self.is_stdin_read, "the standard input can be only one of the secrets");
            self.is_stdin_read = true;
            let mut text = String::new();
            let read = std::io::stdin().read_to_string(&mut text);
            read.context("failed to read a secret from the standard input")?;
            text
        } else {
            let read = std::fs::read_to_string(path);
            read.with_context(|| format!("failed to read a secret from `{}`", path.display()))?
        };
        Ok(text.trim().to_owned())
    }
}

impl EndpointSetArgs {
    /// Returns the settings, with the secrets from their files.
    fn settings(&self) -> Result<NewEndpointBody> {
        ensure!(
            self.receiver_deduplicates || self.duplicates_accepted_by.is_some(),
            "a request may be sent twice: say `--receiver-deduplicates` where the receiver \
                recognises its `Idempotency-Key`, else `--duplicates-accepted-by` and `--because`"
        );
        let mut inputs = Inputs::default();
        let url = match (&self.url, &self.url_file) {
            (Some(url), _) => url.clone(),
            (None, Some(path)) => inputs.secret(path)?,
            (None, None) => bail!("name the URL by `--url` or `--url-file`"),
        };
        let mut headers = BTreeMap::new();
        for (name, value) in &self.header {
            let before = headers.insert(name.to_lowercase(), value.clone());
            ensure!(before.is_none(), "header `{name}` is there twice");
        }
        for (name, file) in &self.secret_header {
            let before = headers.insert(name.to_lowercase(), inputs.secret(Path::new(file))?);
            ensure!(before.is_none(), "header `{name}` is there twice");
        }
        let signing_secret = match &self.signing_secret_file {
            Some(path) => Some(inputs.secret(path)?),
            None => self.unsigned.then(String::new),
        };
        Ok(NewEndpointBody {
            url,
            method: self.method.clone(),
            headers,
            signing_secret,
            connect_timeout_ms: self.connect_timeout_ms,
            timeout_ms: self.timeout_ms,
            requests_per_second: self.requests_per_second,
            requests_max: self.requests_max,
            failures_max: self.failures_max,
            pause_ms: self.pause_ms,
            answer: self.answer.clone(),
            answer_to: self.answer_to.clone(),
            answer_event_type: self.answer_event_type.clone(),
            receiver_deduplicates: self.receiver_deduplicates,
            duplicates_accepted_by: self.duplicates_accepted_by.clone(),
            duplicates_because: self.because.clone(),
        })
    }
}

async fn set(api: &Api, args: EndpointSetArgs, as_json: bool) -> Result<()> {
    let dry_run = args.dry_run.then(|| "true".to_owned());
    let path = with_query(&args.named.path(), &[("dry_run", dry_run)]);
    let set: EndpointChangeBody = api.put_json(&path, &args.settings()?).await?;
    if as_json {
        return output::json(&set);
    }
    let NamedArgs { name, tenant } = &args.named;
    let to_be = if args.dry_run { "would have" } else { "has" };
    let origin = &set.endpoint.origin;
    match (set.is_new, set.changed.is_empty()) {
        (true, _) => println!("tenant `{tenant}` {to_be} the endpoint `{name}` at {origin}"),
        (false, true) => println!("the endpoint `{name}` of tenant `{tenant}` is as it was"),
        (false, false) => println!(
            "the endpoint `{name}` of tenant `{tenant}` {to_be} other settings: {}",
            set.changed.join(", ")
        ),
    }
    let warning = if set.endpoint.receiver_deduplicates { "" } else { "warning: " };
    println!("{warning}{}", duplicates(&set.endpoint));
    Ok(())
}

async fn rotate(api: &Api, named: &NamedArgs, new: NewRotation, as_json: bool) -> Result<()> {
    let finishes = new.finish;
    let rotated: EndpointRotationBody = api.post(&named.path_of("rotate"), &new).await?;
    if as_json {
        return output::json(&rotated);
    }
    let NamedArgs { name, tenant } = named;
    if let Some(secret) = &rotated.signing_secret {
        println!("{secret}");
    }
    if finishes {
        eprintln!("requests to `{name}` are signed with one secret");
    } else {
        eprintln!(
            "requests to `{name}` are signed with {} secrets; when the receiver knows the new one, \
                `oncebox endpoint rotate {name} --tenant {tenant} --finish`",
            rotated.endpoint.signing_secrets
        );
    }
    Ok(())
}

async fn test(api: &Api, named: &NamedArgs, as_json: bool) -> Result<()> {
    let tested: EndpointTestBody = api.post(&named.path_of("test"), &json!({})).await?;
    if as_json {
        return output::json(&tested);
    }
    let answer = match (&tested.status, &tested.error) {
        (Some(status), _) => format!("answered {status}"),
        (None, Some(error)) => error.clone(),
        (None, None) => "did not answer".to_owned(),
    };
    let EndpointTestBody { verdict, took_ms, .. } = &tested;
    println!("endpoint `{}`: {answer} after {took_ms} ms, which counts as {verdict}", named.name);
    ensure!(verdict == "delivered", "the endpoint did not take the test message");
    Ok(())
}

fn list(all: &[EndpointBody]) -> Result<()> {
    let cells = |endpoint: &EndpointBody| {
        let breakers = endpoint.breakers.iter().map(|it| format!("{} on {}", it.state, it.host));
        vec![
            endpoint.name.clone(),
            format!("{} {}", endpoint.method, endpoint.origin),
            endpoint.answer.clone(),
            match &endpoint.duplicates_accepted_by {
                None => "recognised".to_owned(),
                Some(by) => format!("accepted by {by}"),
            },
            breakers.collect::<Vec<_>>().join(", "),
            endpoint.revision.to_string(),
            output::time(endpoint.set_at),
            endpoint.set_by.clone(),
        ]
    };
    output::table(
        &["ENDPOINT", "TO", "ANSWERS", "DUPLICATES", "BREAKER", "REVISION", "SET", "BY"],
        &all.iter().map(cells).collect::<Vec<_>>(),
    );
    Ok(())
}

/// Describes what a request to an endpoint does that is sent twice.
fn duplicates(endpoint: &EndpointBody) -> String {
    let name = &endpoint.name;
    match (&endpoint.duplicates_accepted_by, &endpoint.duplicates_because) {
        (Some(by), because) => format!(
            "endpoint `{name}` may act twice on a message, which {by} accepts: {}",
            because.as_deref().unwrap_or_default()
        ),
        (None, _) => format!("endpoint `{name}` recognises a repeated message by its key"),
    }
}

/// Describes, for `why`, what the endpoints among the destinations of outgoing messages do with a
/// message that is sent twice; a line for each endpoint.
pub(super) async fn notes(api: &Api, outgoing: &[OutgoingRowBody]) -> Result<Vec<String>> {
    let named = |row: &OutgoingRowBody| row.destination.strip_prefix("http:").map(str::to_owned);
    let names: Vec<_> = outgoing.iter().filter_map(named).collect();
    let Some(row) = outgoing.first().filter(|_| !names.is_empty()) else { return Ok(Vec::new()) };
    let endpoints = of_tenant(api, &row.tenant).await?;
    let known = endpoints.iter().filter(|endpoint| names.contains(&endpoint.name));
    Ok(known.map(duplicates).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_a_name_and_a_value() {
        let (name, value) = pair("authorization=Bearer a=b").expect("a pair");
        assert_eq!((name.as_str(), value.as_str()), ("authorization", "Bearer a=b"));
        assert!(pair("authorization").is_err());
    }

    // What could go wrong: two secrets are read from one input, so that one of them is empty.
    #[test]
    fn the_standard_input_is_one_secret() {
        let mut inputs = Inputs { is_stdin_read: true };
        let error = inputs.secret(Path::new("-")).expect_err("read already").to_string();
        assert!(error.contains("only one"), "{error}");
    }
}
