//! Which statements a tenant's own schema may be made with. The text is cut into statements, and
//! each is looked at by its leading words and sent alone: what this takes for one statement and
//! PostgreSQL for several is refused there, so that no mistake here can end the transaction that
//! they run in.

mod kinds;
mod lexer;

pub(crate) use lexer::Statement;

use oncebox_model::problem::Problem;

/// Problems that are told at once.
const PROBLEMS_MAX: usize = 50;

/// The statements of a text, or what is wrong with it, each problem with its line.
pub(crate) fn read(text: &str) -> Result<Vec<Statement>, Vec<Problem>> {
    let statements = lexer::split(text).map_err(|problem| vec![problem])?;
    let problems: Vec<_> =
        statements.iter().filter_map(kinds::problem).take(PROBLEMS_MAX).collect();
    if problems.is_empty() { Ok(statements) } else { Err(problems) }
}

/// What would be refused in a text of a tenant's schema, each with its line. Nothing runs.
pub fn check_schema(text: &str) -> Vec<Problem> {
    read(text).err().unwrap_or_default()
}
