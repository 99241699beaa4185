//! `oncebox consumer readiness`: the seven parts of the baseline, as a gate for a release.

use anyhow::{Result, bail};
use clap::{Args, builder::PossibleValuesParser};
use oncebox_api::wire::{BaselinePartBody, FactAnswerBody, ReadinessBody, ReadinessPartBody};
use oncebox_devkit::{api::Api, output};

use super::Named;

#[derive(Args)]
pub(crate) struct ReadinessArgs {
    #[command(flatten)]
    of: Named,
    /// Parts that must be met; by default all, with commas between them
    #[arg(long, value_name = "PARTS", value_delimiter = ',', value_parser = parts())]
    require: Vec<String>,
}

fn parts() -> PossibleValuesParser {
    PossibleValuesParser::new(BaselinePartBody::ALL.map(BaselinePartBody::name))
}

impl ReadinessArgs {
    /// Returns whether a part must be met.
    fn requires(&self, part: BaselinePartBody) -> bool {
        self.require.is_empty() || self.require.iter().any(|name| name == part.name())
    }
}

/// Prints the parts with their facts, and fails where a required part is not met.
pub(super) async fn run(api: &Api, args: &ReadinessArgs, json: bool) -> Result<()> {
    let report: ReadinessBody = api.get(&args.of.path(&["readiness"])).await?;
    if json {
        output::json(&report)?;
    } else {
        report.parts.iter().for_each(print);
    }
    let unmet: Vec<_> = report
        .parts
        .iter()
        .filter(|part| args.requires(part.part) && part.answer != FactAnswerBody::Met)
        .map(|part| format!("{} ({})", part.part.name(), word(part.answer)))
        .collect();
    if !unmet.is_empty() {
        bail!("consumer {} is not ready: {}", args.of.shown(), unmet.join(", "));
    }
    if !json {
        println!("consumer {} meets {}", args.of.shown(), required(args));
    }
    Ok(())
}

fn required(args: &ReadinessArgs) -> String {
    match args.require.as_slice() {
        [] => "all seven parts".to_owned(),
        parts => parts.join(", "),
    }
}

fn print(part: &ReadinessPartBody) {
    println!("{:<9}  {}", word(part.answer), part.part.name());
    for fact in &part.facts {
        println!("           {}: {}, {}", word(fact.answer), fact.name, fact.found);
        if let Some(advice) = &fact.advice {
            println!("             {advice}");
        }
    }
}

/// Returns the word for an answer.
fn word(answer: FactAnswerBody) -> &'static str {
    match answer {
        FactAnswerBody::Met => "met",
        FactAnswerBody::NotKnown => "not known",
        FactAnswerBody::NotMet => "not met",
    }
}
