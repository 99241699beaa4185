//! Errors as text for operators.

use oncebox_model::InboxError;

/// Returns an error in one line, followed by a line for each reason where there are several.
pub fn lines(error: &anyhow::Error) -> Vec<String> {
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
pub fn one_line(error: &anyhow::Error) -> String {
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

/// Refusal to deploy or apply something, with every reason.
#[derive(Debug)]
pub struct Unfit {
    what: String,
    reasons: Vec<String>,
}

impl Unfit {
    /// Returns the error for a component that cannot be deployed.
    pub fn component(name: &str, reasons: Vec<String>) -> Self {
        Self { what: format!("`{name}` cannot be deployed"), reasons }
    }

    /// Returns the error for migrations with statements that are not for a schema.
    pub fn statements(reasons: Vec<String>) -> Self {
        Self { what: "nothing was applied".to_owned(), reasons }
    }

    /// Returns the reasons, one line each.
    pub fn reasons(&self) -> &[String] {
        &self.reasons
    }
}

impl std::fmt::Display for Unfit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.reasons[..] {
            [reason] => write!(f, "{}: {reason}", self.what),
            reasons => write!(f, "{}, for {} reasons", self.what, reasons.len()),
        }
    }
}

impl std::error::Error for Unfit {}
