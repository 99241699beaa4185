//! Requests and words of commands, from the fields of a form.

use serde_json::Value;

use crate::{action::Call, command::option, fields::Fields, refusal::Refusal};

/// Returns a POST request below the path of a consumer.
pub(super) fn of_consumer(fields: &Fields, rest: &[&str], body: Value) -> Result<Call, Refusal> {
    let start = ["tenants", fields.need("tenant")?, "consumers", fields.need("consumer")?];
    Ok(Call::post(&[&start, rest].concat(), body))
}

pub(super) fn number<T: std::str::FromStr>(fields: &Fields, name: &str) -> Result<T, Refusal> {
    let text = fields.need(name)?;
    text.trim().parse().map_err(|_| Refusal::invalid(format!("`{name}` is `{text}`; use a number")))
}

/// Returns the words of a command: its names, then options and arguments with the values of fields.
/// A word behind `=` stands for itself.
pub(super) fn named(
    names: &[&str],
    fields: &Fields,
    option_names: &[&str],
    arguments: &[&str],
) -> Vec<String> {
    let mut words: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
    words.extend(options(fields, option_names));
    words.extend(arguments.iter().filter_map(|argument| match argument.strip_prefix('=') {
        Some(word) => Some(word.to_owned()),
        None => fields.get(argument).map(str::to_owned),
    }));
    words
}

/// Returns the options of a command that have a value.
pub(super) fn options(fields: &Fields, names: &[&str]) -> Vec<String> {
    let given = names.iter().filter_map(|name| Some(option(name, fields.get(name)?)));
    given.flatten().collect()
}

/// Text for what the visitor fills in, in a command.
pub(super) const ANY: &str = "…";

/// Returns fields in which those that the visitor fills in have a placeholder.
pub(super) fn with(fields: &Fields, placeholders: &[(&str, &str)]) -> Fields {
    let mut fields = fields.clone();
    for (name, placeholder) in placeholders {
        if fields.get(name).is_none() {
            fields.0.push(((*name).to_owned(), (*placeholder).to_owned()));
        }
    }
    fields
}
