//! Tenants, endpoints, consumers and deployments as a file says them. The file is compared with what
//! is there, and the plan is shown before anything changes. It never takes anything away.

// The file, read and checked.
mod file;
// The endpoints of the file.
mod endpoint;
// What is there, compared with what should be.
mod plan;
// The plan, step by step.
mod carry_out;

use std::path::Path;

use anyhow::Result;

pub use carry_out::{Applied, carry_out};
pub use file::read;
pub use plan::{PlanLine, Sign, compare};

use crate::{api::Api, migration::Open};

/// Applies a text without printing anything.
pub async fn apply(api: &Api, name: &Path, text: &str, open: Open<'_>) -> Result<()> {
    let tenants = file::parse(name, text, open)?;
    let changes = compare(api, &tenants).await?;
    carry_out(api, &changes).await.map(drop)
}
