//! Errors as text for operators.

use oncebox_model::InboxError;

use crate::cli::Unfit;

/// Returns an error in one line, followed by a line for each reason where there are several.
pub(crate) fn lines(error: &anyhow::Error) -> Vec<String> {
    if let Some(InboxError::Policy(problems)) = error.downcast_ref()
        && problems.len() > 1
    {
        let contexts = error.chain().map(ToString::to_string).take(error.chain().count() - 1);
        let first =
            format!("{}, for {} reasons", contexts.collect::<Vec<_>>().join(": "), problems.len());
        return [first]
            .into_iter()
            .chain(problems.iter().map(|problem| problem.text.clone()))
            .collect();
    }
    let mut lines = vec![one_line(error)];
    if let Some([first, second, rest @ ..]) = error.downcast_ref::<Unfit>().map(Unfit::reasons) {
        lines.extend(
            [first, second]
                .into_iter()
                .chain(rest)
                .map(|reason| reason.split_whitespace().collect::<Vec<_>>().join(" ")),
        );
    }
    lines
}

/// Returns an error with its causes and a remedy in one line, whatever line breaks the causes have.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let mut texts: Vec<String> = Vec::new();
    let mut remedy = "";
    for cause in error.chain() {
        let text = cause.to_string();
        // Some errors repeat their cause in their own words.
        if !texts.iter().any(|known| known.contains(&text)) {
            texts.push(text);
        }
        if let Some(error) = cause.downcast_ref::<InboxError>() {
            if matches!(error, InboxError::Unreachable(_)) {
                remedy = "; check `database.url` (ONCEBOX_DATABASE_URL)";
            }
            break; // it says what its causes say
        }
    }
    let text = texts.join(": ") + remedy;
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
