//! Reads the command line. A `--tenant` or `--consumer` that is left out is looked up where only
//! one exists.

use std::ffi::OsString;

use anyhow::{Context, Result, bail};
use clap::{
    ArgMatches, CommandFactory, FromArgMatches,
    error::{ContextKind, ContextValue, ErrorKind},
};
use oncebox_api::wire::{ConsumerBody, TenantBody, Whoami};
use oncebox_devkit::api::{Api, path};

use super::{Cli, Command};

/// Options that may be left out where one value exists.
const LOOKED_UP: [&str; 2] = ["--tenant", "--consumer"];
/// Stand-in for a value that is looked up later.
const PLACEHOLDER: &str = "?";

/// A command line, and the options that it leaves out.
pub(super) struct Arguments {
    words: Vec<OsString>,
    missing: Vec<&'static str>,
    matches: ArgMatches,
}

/// Parses the words of the command line, or ends the process with an error that says what is wrong.
pub(super) fn parse() -> (Cli, Arguments) {
    let words: Vec<_> = std::env::args_os().collect();
    let error = match parsed(&words) {
        Ok((cli, matches)) => return (cli, Arguments { words, missing: Vec::new(), matches }),
        Err(error) => error,
    };
    let missing = looked_up(&error);
    if !missing.is_empty() {
        let placeholders: Vec<_> = missing.iter().map(|option| (*option, PLACEHOLDER)).collect();
        if let Ok((cli, matches)) = parsed(&with(&words, &placeholders))
            && matches!(cli.command, Command::OfApi(_))
        {
            return (cli, Arguments { words, missing, matches });
        }
    }
    error.exit()
}

impl Arguments {
    /// Returns the command with the tenant and the consumer that were left out.
    ///
    /// # Errors
    /// There is none of them, or more than one.
    pub(super) async fn complete(self, api: &Api, command: Command) -> Result<Command> {
        if self.missing.is_empty() {
            return Ok(command);
        }
        let tenant = match self.value("tenant").filter(|tenant| *tenant != PLACEHOLDER) {
            Some(tenant) => tenant.to_owned(),
            None => only_tenant(api).await?,
        };
        let mut found = vec![("--tenant", tenant.clone())];
        if self.missing.contains(&"--consumer") {
            found.push(("--consumer", only_consumer(api, &tenant).await?));
        }
        let found: Vec<_> = found
            .iter()
            .filter(|(option, _)| self.missing.contains(option))
            .map(|(option, name)| (*option, name.as_str()))
            .collect();
        match parsed(&with(&self.words, &found)) {
            Ok((cli, _)) => Ok(cli.command),
            Err(error) => error.exit(),
        }
    }

    /// Returns the value of an option of the innermost subcommand.
    fn value(&self, option: &str) -> Option<&str> {
        let mut matches = &self.matches;
        while let Some((_, inner)) = matches.subcommand() {
            matches = inner;
        }
        matches.try_get_one::<String>(option).ok()?.map(String::as_str)
    }
}

/// Returns the program's commands. The usage of each shows its own arguments alone, whatever the
/// environment sets.
pub(super) fn command() -> clap::Command {
    let mut command = Cli::command();
    command.build();
    with_own_usage(command)
}

fn with_own_usage(mut command: clap::Command) -> clap::Command {
    let usage = command.render_usage().to_string();
    let usage = usage.strip_prefix("Usage: ").unwrap_or(&usage).to_owned();
    command.override_usage(usage).mut_subcommands(with_own_usage)
}

fn parsed(words: &[OsString]) -> Result<(Cli, ArgMatches), clap::Error> {
    let matches = command().try_get_matches_from(words)?;
    let cli = Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command()))?;
    Ok((cli, matches))
}

/// Returns the options that the command line lacks, if all of them can be looked up.
fn looked_up(error: &clap::Error) -> Vec<&'static str> {
    let Some(ContextValue::Strings(missing)) = error
        .get(ContextKind::InvalidArg)
        .filter(|_| error.kind() == ErrorKind::MissingRequiredArgument)
    else {
        return Vec::new();
    };
    let option = |missing: &String| {
        LOOKED_UP.into_iter().find(|option| missing.split(' ').next() == Some(option))
    };
    missing.iter().map(option).collect::<Option<_>>().unwrap_or_default()
}

/// Returns the words with options added, before a `--` that ends options.
fn with(words: &[OsString], options: &[(&str, &str)]) -> Vec<OsString> {
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    let added =
        options.iter().flat_map(|(option, value)| [OsString::from(option), OsString::from(value)]);
    words[..end].iter().cloned().chain(added).chain(words[end..].iter().cloned()).collect()
}

/// Returns the tenant of the caller's token; none for a token of the platform.
async fn own_tenant(api: &Api) -> Result<Option<String>> {
    Ok(api.get::<Whoami>(&path(&["whoami"])).await?.tenant)
}

/// Returns the tenant that is named, else that of the caller's token.
pub(super) async fn named_or_own(api: &Api, named: Option<String>) -> Result<Option<String>> {
    match named {
        Some(tenant) => Ok(Some(tenant)),
        None => own_tenant(api).await,
    }
}

/// Returns the tenants that the caller sees.
pub(super) async fn tenants(api: &Api) -> Result<Vec<TenantBody>> {
    match own_tenant(api).await? {
        Some(tenant) => Ok(vec![api.get(&path(&["tenants", &tenant])).await?]),
        None => api.get(&path(&["tenants"])).await,
    }
}

/// Returns the tenant that is named, else the only one that there is.
pub(super) async fn named_or_only(api: &Api, named: Option<String>) -> Result<String> {
    match named {
        Some(tenant) => Ok(tenant),
        None => only_tenant(api).await,
    }
}

async fn only_tenant(api: &Api) -> Result<String> {
    let names =
        tenants(api).await.context("`--tenant` was left out, and the tenants cannot be listed")?;
    only(
        names.into_iter().map(|tenant| tenant.name).collect(),
        "tenant",
        "--tenant",
        "oncebox tenant create",
    )
}

async fn only_consumer(api: &Api, tenant: &str) -> Result<String> {
    let consumers: Vec<ConsumerBody> = api.get(&path(&["tenants", tenant, "consumers"])).await?;
    let names = consumers.into_iter().map(|consumer| consumer.name).collect();
    only(names, &format!("consumer of tenant `{tenant}`"), "--consumer", "oncebox consumer create")
}

fn only(mut names: Vec<String>, noun: &str, option: &str, create: &str) -> Result<String> {
    const SHOWN_MAX: usize = 5;
    let count = names.len();
    match names.pop() {
        None => bail!("there is no {noun} yet; `{create}` makes one"),
        Some(name) if names.is_empty() => Ok(name),
        Some(name) => {
            names.push(name);
            let shown: Vec<_> =
                names.iter().take(SHOWN_MAX).map(|name| format!("`{name}`")).collect();
            let more = if count > SHOWN_MAX { ", …" } else { "" };
            bail!(
                "`{option}` is needed, since there is more than one {noun}: {}{more}",
                shown.join(", ")
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = include_str!("../../../docs/commands.md");

    /// Returns the words in backticks.
    fn words(text: &str) -> Vec<String> {
        text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    /// Returns the first two cells of each row of the table with this heading.
    fn table(heading: &str) -> Vec<(Vec<String>, Vec<String>)> {
        let rows = PAGE.split_once(&format!("| {heading} |")).expect("the table").1.lines().skip(2);
        let rows = rows.take_while(|row| row.starts_with('|'));
        rows.map(|row| row.trim_matches('|').split_once('|').expect("two cells"))
            .map(|(a, b)| (words(a), words(b)))
            .collect()
    }

    // What could go wrong: the page promises a verb that does not exist, or a command is on no
    // page.
    #[test]
    fn the_page_has_every_command_and_no_other() {
        let mut found = Vec::new();
        collect(&command(), "", &mut found);
        let mut shown: Vec<_> = table("command").into_iter().flat_map(|(words, _)| words).collect();
        for (noun, verbs) in table("noun") {
            shown.extend(verbs.iter().map(|verb| format!("{} {verb}", noun[0])));
        }
        // A verb with verbs of its own has a row of its own.
        let nouns: Vec<_> = table("noun").into_iter().map(|(noun, _)| noun[0].clone()).collect();
        shown.retain(|command| !nouns.contains(command));
        found.sort();
        shown.sort();
        assert_eq!(found, shown);
    }

    fn collect(command: &clap::Command, path: &str, found: &mut Vec<String>) {
        for inner in command.get_subcommands().filter(|inner| inner.get_name() != "help") {
            let path = format!("{path} {}", inner.get_name()).trim().to_owned();
            match inner.has_subcommands() {
                true => collect(inner, &path, found),
                false => found.push(path),
            }
        }
    }

    #[test]
    fn what_exists_can_be_listed_and_shown_and_what_starts_can_be_stopped() {
        let command = command();
        for noun in ["tenant", "consumer", "version", "canary", "shadow", "inbox", "outgoing"] {
            let noun = command.find_subcommand(noun).expect("a noun");
            let has = |verb: &str| noun.find_subcommand(verb).is_some();
            assert!(has("list") && has("show"), "{}", noun.get_name());
            assert_eq!(has("start"), has("stop"), "{}", noun.get_name());
        }
    }
}
