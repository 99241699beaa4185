//! `oncebox policy …`: policies as files, without a server.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use oncebox_devkit::{migration::read_text, output, policy_file::read_policy};
use oncebox_model::policy::{
    Jitter, Policy, PolicyProblem, Preset, ReadinessAnswer, ReadinessVerdict,
};
use oncebox_server::brokers::check_kafka;
use serde::Serialize;

#[derive(Subcommand)]
pub(super) enum PolicyCommand {
    /// Look whether policies can work; everything that is wrong is said, with its line
    Check {
        /// TOML files with a policy each
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Say in sentences what a policy does, and answer what is asked of a consumer before it is
    /// relied on
    Explain {
        /// TOML file with the policy
        file: PathBuf,
    },
    /// List the ladders of retries that have a name
    Presets,
}

/// Problems of one file.
#[derive(Serialize)]
struct Checked {
    file: PathBuf,
    problems: Vec<PolicyProblem>,
}

pub(super) fn run(command: PolicyCommand, json: bool) -> Result<()> {
    match command {
        PolicyCommand::Check { files } => check(&files, json),
        PolicyCommand::Explain { file } => {
            explain(&read_policy(TENANT, CONSUMER, &file, &|path| std::fs::read(path))?, json)
        }
        PolicyCommand::Presets => presets(json),
    }
}

/// Stand-ins for names: a file does not tell its tenant and consumer, and no rule depends on them.
const TENANT: &str = "tenant";
const CONSUMER: &str = "consumer";

fn check(files: &[PathBuf], json: bool) -> Result<()> {
    let checked: Vec<_> = files
        .iter()
        .map(|file| Ok(Checked { file: file.clone(), problems: problems(file)? }))
        .collect::<Result<_>>()?;
    if json {
        output::json(&checked)?;
    }
    for Checked { file, problems } in checked.iter().filter(|_| !json) {
        match problems.len() {
            0 => println!("`{}` can work", file.display()),
            1 => println!("`{}` cannot work:", file.display()),
            count => println!("`{}` cannot work, for {count} reasons:", file.display()),
        }
        problems.iter().for_each(|problem| println!("  {problem}"));
    }
    match checked.iter().filter(|checked| !checked.problems.is_empty()).count() {
        0 => Ok(()),
        wrong => bail!("{wrong} of {} policies cannot work", checked.len()),
    }
}

fn problems(file: &Path) -> Result<Vec<PolicyProblem>> {
    let text = read_text(file, &|path| std::fs::read(path))
        .with_context(|| format!("failed to read the policy `{}`", file.display()))?;
    let (policy, mut problems) = Policy::read(&text);
    if let Some(Err(error)) = policy.map(|policy| check_kafka(TENANT, CONSUMER, &policy)) {
        problems.push(PolicyProblem {
            key: "kafka".to_owned(),
            line: None,
            text: error.to_string(),
        });
    }
    Ok(problems)
}

/// Prints a policy in sentences, with the questions that it answers.
pub(super) fn explain(policy: &Policy, json: bool) -> Result<()> {
    #[derive(Serialize)]
    struct Explained {
        sentences: Vec<String>,
        readiness: Vec<ReadinessAnswer>,
    }
    let explained = Explained { sentences: policy.explain(), readiness: policy.readiness() };
    if json {
        return output::json(&explained);
    }
    explained.sentences.iter().for_each(|sentence| println!("{sentence}"));
    println!();
    let standing = |answer: &ReadinessAnswer| match answer.standing {
        ReadinessVerdict::Holds => "holds",
        ReadinessVerdict::Look => "look",
        ReadinessVerdict::Missing => "MISSING",
    };
    for (number, answer) in explained.readiness.iter().enumerate() {
        println!(
            "{:>2}. {}\n    {}: {}",
            number + 1,
            answer.question,
            standing(answer),
            answer.answer
        );
    }
    Ok(())
}

fn presets(json: bool) -> Result<()> {
    let ladders: Vec<_> = Preset::ALL.into_iter().map(Preset::retry).collect();
    if json {
        return output::json(&ladders);
    }
    let row = |ladder: &oncebox_model::policy::Retry| {
        let steps = (1..ladder.attempts_max)
            .map(|attempts| format!("{} s", ladder.bound(attempts).as_secs()));
        vec![
            ladder.preset.map_or_else(String::new, |preset| preset.name().to_owned()),
            ladder.attempts_max.to_string(),
            if ladder.jitter == Jitter::Full { "0 to" } else { "exactly" }.to_owned(),
            steps.collect::<Vec<_>>().join(", "),
        ]
    };
    output::table(
        &["PRESET", "RUNS", "DELAY", "AFTER EACH FAILURE"],
        &ladders.iter().map(row).collect::<Vec<_>>(),
    );
    Ok(())
}
