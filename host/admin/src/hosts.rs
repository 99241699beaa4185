//! The hosts that run.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A host that was seen lately.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Host {
    /// Key; a restart is another host.
    pub host_id: i64,
    /// Name of the machine and id of the process.
    pub name: String,
    /// When it started.
    pub started_at: DateTime<Utc>,
    /// When it last said that it lives.
    pub seen_at: DateTime<Utc>,
}
