//! `oncebox choose`: questions about an effect, and the pattern that fits.

use std::io::{self, BufRead, IsTerminal, Write};

use anyhow::{Context, Result, bail};
use clap::{
    Args,
    builder::{PossibleValue, PossibleValuesParser},
};
use oncebox_api::wire::BaselinePartBody;
use oncebox_devkit::{
    choose::{Answers, Choice, Question},
    output,
};
use serde_json::{Value, json};

#[derive(Args)]
pub(super) struct ChooseArgs {
    /// What a message does
    #[arg(long, value_parser = answers(Question::Effect))]
    effect: Option<String>,
    /// How the other system recognises a call that is repeated
    #[arg(long, value_parser = answers(Question::OtherSide))]
    other_side: Option<String>,
    /// Which order messages about one object need
    #[arg(long, value_parser = answers(Question::Order))]
    order: Option<String>,
    /// Where a message carries its id
    #[arg(long, value_parser = answers(Question::Id))]
    id: Option<String>,
    /// Whether the producer may send one fact under two ids
    #[arg(long, value_parser = answers(Question::TwoIds))]
    two_ids: Option<String>,
    /// Whether single messages are looked up after they completed
    #[arg(long, value_parser = answers(Question::LookUp))]
    look_up: Option<String>,
    /// Whether operators may set the offsets back
    #[arg(long, value_parser = answers(Question::Replay))]
    replay: Option<String>,
}

fn answers(question: Question) -> PossibleValuesParser {
    let shown = question.answers().iter();
    PossibleValuesParser::new(shown.map(|it| PossibleValue::new(it.name).help(it.text)))
}

impl ChooseArgs {
    /// Returns the answers that the options give.
    fn answers(&self) -> Answers {
        let mut answers = Answers::default();
        for question in Question::ALL {
            if let Some(number) = self.option(question).and_then(|name| number(question, name)) {
                answers.give(question, number);
            }
        }
        answers
    }

    fn option(&self, question: Question) -> Option<&str> {
        let option = match question {
            Question::Effect => &self.effect,
            Question::OtherSide => &self.other_side,
            Question::Order => &self.order,
            Question::Id => &self.id,
            Question::TwoIds => &self.two_ids,
            Question::LookUp => &self.look_up,
            Question::Replay => &self.replay,
        };
        option.as_deref()
    }
}

/// Asks what the options leave open, and prints the pattern that fits.
pub(super) fn run(args: &ChooseArgs, json: bool) -> Result<()> {
    let mut answers = args.answers();
    while let Some(question) = answers.next() {
        if !io::stdin().is_terminal() {
            bail!(
                "`--{}` is needed where no terminal can be asked: {}",
                question.name(),
                names(question)
            );
        }
        answers.give(question, ask(&mut io::stdin().lock(), &mut io::stderr(), question)?);
    }
    if let Some(question) = answers.unneeded() {
        bail!("`--{}` changes nothing after the other answers; leave it out", question.name());
    }
    let choice = Choice::of(&answers).context("the answers lead to no pattern")?;
    if json {
        return output::json(&document(&answers, &choice));
    }
    print(&answers, &choice);
    Ok(())
}

/// Asks one question until the answer is one of those shown, and returns its number.
fn ask(input: &mut impl BufRead, output: &mut impl Write, question: Question) -> Result<usize> {
    writeln!(output, "{}", question.text())?;
    for (nth, answer) in question.answers().iter().enumerate() {
        writeln!(output, "  {}  {:<12} {}", nth + 1, answer.name, answer.text)?;
    }
    loop {
        write!(output, "[1-{}] ", question.answers().len())?;
        output.flush()?;
        let mut line = String::new();
        if input.read_line(&mut line)? == 0 {
            bail!(
                "no answer to `{}`; it is also the option `--{}`",
                question.text(),
                question.name()
            );
        }
        if let Some(number) = number(question, line.trim()) {
            writeln!(output)?;
            return Ok(number);
        }
        writeln!(output, "answer with a number or a name of the list")?;
    }
}

/// Returns the number of an answer, by its name or by the number that is shown.
fn number(question: Question, text: &str) -> Option<usize> {
    let answers = question.answers();
    let by_name = answers.iter().position(|answer| answer.name == text);
    let shown = text.parse::<usize>().ok().filter(|shown| (1..=answers.len()).contains(shown));
    by_name.or(shown.map(|shown| shown - 1))
}

fn names(question: Question) -> String {
    let names = question.answers().iter().map(|answer| format!("`{}`", answer.name));
    names.collect::<Vec<_>>().join(", ")
}

/// Returns the answers that were given, by the name of their question.
fn given(answers: &Answers) -> impl Iterator<Item = (&'static str, &'static str)> {
    let answer = move |question: Question| Some((question.name(), answers.answer(question)?.name));
    Question::ALL.into_iter().filter_map(answer)
}

fn document(answers: &Answers, choice: &Choice) -> Value {
    let answers: serde_json::Map<String, Value> =
        given(answers).map(|(name, answer)| (name.to_owned(), answer.into())).collect();
    json!({
        "answers": answers,
        "pattern": choice.pattern,
        "title": choice.pattern.title(),
        "why": choice.why,
        "duties": choice.duties,
        "gives": choice.gives,
        "does_not_give": choice.lacks,
        "policy": choice.policy,
        "gate": { "cannot_meet": unmet(choice), "require": required(choice) },
        "pages": choice.pages,
    })
}

fn print(answers: &Answers, choice: &Choice) {
    println!("{}", choice.pattern.title());
    list("why", choice.why.iter().copied());
    list("to do beside the policy", choice.duties.iter().copied());
    list("gives", choice.gives.iter().map(|property| property.given()));
    list("does not give", choice.lacks.iter().map(|property| property.lacking()));
    println!("\npolicy (`oncebox policy check` and `explain` read it as a file):\n");
    choice.policy.lines().for_each(|line| println!("  {line}"));
    print_gate(choice);
    list("read", choice.pages.iter().copied());
    let options: Vec<_> =
        given(answers).map(|(name, answer)| format!("--{name} {answer}")).collect();
    println!("\nthe same without questions: oncebox choose {}", options.join(" "));
}

/// Prints what the gate before a release can ask of a consumer with this policy.
fn print_gate(choice: &Choice) {
    list("the gate before a release cannot be met in", unmet(choice).into_iter());
    let parts = match choice.unmet.as_slice() {
        [] => String::new(),
        _ => format!(" --require {}", required(choice).join(",")),
    };
    println!("\nthe gate: oncebox consumer readiness CONSUMER --tenant TENANT{parts}");
}

/// Returns the names of the parts that no consumer with this policy meets.
fn unmet(choice: &Choice) -> Vec<&'static str> {
    choice.unmet.iter().map(|part| BaselinePartBody::from(*part).name()).collect()
}

/// Returns the names of the other parts.
fn required(choice: &Choice) -> Vec<&'static str> {
    choice.within_reach().map(|part| BaselinePartBody::from(part).name()).collect()
}

fn list(heading: &str, texts: impl Iterator<Item = &'static str>) {
    let texts: Vec<_> = texts.collect();
    if texts.is_empty() {
        return;
    }
    println!("\n{heading}:");
    texts.iter().for_each(|text| println!("- {text}"));
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    // What could go wrong: an answer that is none is taken for one, or the end of the input for the
    // first answer.
    #[test]
    fn a_question_is_repeated_until_its_answer_is_one() {
        let asked = |input: &str| {
            let mut output = Vec::new();
            let answer = ask(&mut input.as_bytes(), &mut output, Question::Order);
            (answer.ok(), String::from_utf8(output).expect("text"))
        };
        let (answer, output) = asked("\n0\n4\nversions\n3\n");
        assert_eq!((answer, output.matches("[1-3] ").count()), (Some(2), 5), "{output}");
        assert_eq!(asked("arrival\n").0, Some(1));
        assert_eq!(asked("what\n").0, None);
    }

    // What could go wrong: a question has no option, so that the command needs a terminal.
    #[test]
    fn each_question_is_an_option() {
        let command = crate::Cli::command();
        let choose = command.find_subcommand("choose").expect("the command");
        for question in Question::ALL {
            let option = choose.get_arguments().find(|it| it.get_long() == Some(question.name()));
            let option = option.unwrap_or_else(|| panic!("{}", question.name()));
            let values = option.get_possible_values();
            let values: Vec<_> = values.iter().map(|value| value.get_name()).collect();
            let names: Vec<_> = question.answers().iter().map(|answer| answer.name).collect();
            assert_eq!(values, names);
        }
    }
}
