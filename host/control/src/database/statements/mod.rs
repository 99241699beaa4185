//! Checks of the statements in a tenant's own schema. The text is cut into statements. Each is
//! checked by its leading words and sent alone. Where this module sees one statement and PostgreSQL
//! several, PostgreSQL refuses it. So no mistake here can end the transaction that the statements
//! run in.

mod kinds;
mod lexer;

pub(crate) use lexer::Statement;

use oncebox_model::problem::Problem;

/// Maximum of problems in one report.
const PROBLEMS_MAX: usize = 50;

/// Returns the statements of a text, or its problems, each with its line.
pub(crate) fn read(text: &str) -> Result<Vec<Statement>, Vec<Problem>> {
    let statements = lexer::split(text).map_err(|problem| vec![problem])?;
    let problems: Vec<_> =
        statements.iter().filter_map(kinds::problem).take(PROBLEMS_MAX).collect();
    if problems.is_empty() { Ok(statements) } else { Err(problems) }
}

/// Returns the problems for which a text of a tenant's schema would be refused, each with its line.
/// Executes nothing.
pub fn check_schema(text: &str) -> Vec<Problem> {
    read(text).err().unwrap_or_default()
}
