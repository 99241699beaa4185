//! The choice of a pattern for an effect: questions, and what follows from their answers. The
//! decision is made of the answers alone, so that every path can be tried.

// The questions and their answers.
mod questions;
// The pattern, its reasons and its limits.
mod decide;
// The lines of a policy.
mod lines;
// Effects outside of the database.
mod outside;

pub use self::{
    decide::{Choice, Pattern, Property},
    questions::{AnswerText, Answers, EffectKind, IdPlace, OrderNeed, OtherSide, Question, YesNo},
};

#[cfg(test)]
mod tests;
