//! Databases with an inbox.

use std::{fmt, sync::Arc, time::Duration};

use axum::{Json, extract::State};
use oncebox_control::{Control, DatabaseLabel, DatabaseUse};
use oncebox_model::InboxError;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Api, auth::Caller, error::ApiError, shared_answers::SharedAnswers};

/// The words for a database with an inbox; both are null for the host's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[schema(as = DatabaseLabel)]
pub struct DatabaseLabelBody {
    /// Tenant that named the database; the first one where several did. Null for one in which hosts
    /// place tenants.
    pub tenant: Option<String>,
    /// Name of the database in the configuration of hosts; where it has none, its host, port and
    /// name.
    #[serde(default)]
    pub database: Option<String>,
}

impl From<DatabaseLabel> for DatabaseLabelBody {
    fn from(label: DatabaseLabel) -> Self {
        let DatabaseLabel { tenant, database } = label;
        Self { tenant, database }
    }
}

impl DatabaseLabelBody {
    /// Returns the name of the tenant or of the database; none for the host's.
    pub fn name(&self) -> Option<&str> {
        self.tenant.as_deref().or(self.database.as_deref())
    }
}

impl fmt::Display for DatabaseLabelBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.tenant, &self.database) {
            (Some(tenant), _) => write!(f, "the database of tenant `{tenant}`"),
            (None, Some(database)) => write!(f, "database `{database}`"),
            (None, None) => write!(f, "the host's database"),
        }
    }
}

/// A database in which hosts place tenants.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Database)]
pub struct DatabaseBody {
    /// Its name in `[[databases]]`.
    pub name: String,
    /// Host, port and name; null where the configuration of this process does not name it.
    pub address: Option<String>,
    /// Its share of new tenants beside the weights of the others, 0 for none; null where the
    /// configuration of this process does not name it.
    pub weight: Option<u32>,
    /// Connections of all tenants in it together, per host; null where the configuration of this
    /// process does not name it.
    pub connections_max: Option<usize>,
    /// Number of the tenants in it.
    pub tenants: u64,
    /// Cause where it does not answer, or is not the database that its tenants are in; else null.
    pub error: Option<String>,
}

/// Databases that are checked at a time.
const AT_ONCE: usize = 16;
/// Time for which a check counts.
const FRESH: Duration = Duration::from_secs(5);

/// The last check of each named database.
pub(crate) type DatabaseChecks = SharedAnswers<String, (), Arc<InboxError>>;

/// Creates the store of checks.
pub(crate) fn checks() -> DatabaseChecks {
    SharedAnswers::new(AT_ONCE, FRESH, FRESH)
}

/// List the databases in which hosts place tenants
///
/// The configuration of the process that answers names them, and tenants' rows those that it does
/// not name. Each was checked within the last five seconds.
#[utoipa::path(get, path = "/v1/databases", tag = "databases", responses((status = 200, body = Vec<DatabaseBody>)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    State(api): State<Api>,
) -> Result<Json<Vec<DatabaseBody>>, ApiError> {
    let databases = caller.control.tenant_databases().named().await?;
    let looks = databases.into_iter().map(|database| body(&api, &caller.control, database));
    Ok(Json(futures::future::join_all(looks).await))
}

async fn body(api: &Api, control: &Control, database: DatabaseUse) -> DatabaseBody {
    let (control, of) = (control.clone(), database.clone());
    let checking =
        async move { control.tenant_databases().check_named(&of).await.map_err(Arc::new) };
    let checked = api.database_checks().get(api.tasks(), database.name.clone(), checking).await;
    let error = match checked {
        Ok(checked) => checked.err().map(|error| error.to_string()),
        Err(error) => Some(error.to_string()),
    };
    let DatabaseUse { name, address, weight, connections_max, tenants } = database;
    DatabaseBody { name, address, weight, connections_max, tenants, error }
}
