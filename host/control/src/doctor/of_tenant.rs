//! The checks of one tenant's database on which the promise about its messages rests.

use oncebox_model::error::InboxError;

use super::{Finding, HostLimits, Look, place_name, queries};
use crate::{handles::Doctor, tenants::Tenant};

impl Doctor<'_> {
    /// Runs the checks with these names, of those that are a query or look at the host's objects,
    /// on the database with a tenant's inbox. The check `ids` reads the rows of one consumer.
    ///
    /// # Errors
    /// The address of the tenant's database cannot be unsealed, or the database does not answer.
    pub(crate) async fn checks_of_consumer(
        &self,
        tenant: &Tenant,
        consumer_id: i32,
        names: &[&str],
    ) -> Result<Vec<Finding>, InboxError> {
        let look = self.look_at(tenant).await?;
        let mut findings = Vec::new();
        for check in queries().filter(|check| names.contains(&check.name)) {
            findings.extend(look.ask(check).await);
        }
        if names.contains(&"host_code") {
            findings.extend(look.functions_are_as_shipped().await);
        }
        if names.contains(&"partitions") {
            findings.extend(look.partitions_are_made_ahead().await);
        }
        if names.contains(&"ids") {
            findings.extend(look.ids_of_consumer(consumer_id).await);
        }
        Ok(findings)
    }

    /// Returns the database of a tenant under check, with this tenant alone.
    async fn look_at(&self, tenant: &Tenant) -> Result<Look<'_>, InboxError> {
        let database = self.0.tenant_databases().get(tenant)?;
        let version: i32 = sqlx::query_scalar("SELECT current_setting('server_version_num')::int")
            .fetch_one(&database.pool)
            .await?;
        Ok(Look {
            control: self.0,
            place: place_name(&database.options),
            pool: database.pool,
            options: database.options,
            tenants: vec![tenant.clone()],
            limits: HostLimits { connections_max: 0 },
            version,
        })
    }
}
