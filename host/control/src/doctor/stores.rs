//! Stores: the consumers whose messages refer to payloads have access to the store that their
//! policies name.

use oncebox_model::error::InboxError;

use super::{Finding, Severity};
use crate::{consumers::Consumer, handles::Doctor, tenants::Tenant};

const CHECK: &str = "stores";

impl Doctor<'_> {
    /// Checks that each consumer whose messages refer to payloads has access to its store. It asks
    /// no store. Returns nothing where there is no such consumer.
    pub(super) async fn stores_are_open(&self) -> Vec<Finding> {
        let found = async {
            let (tenants, consumers) =
                (self.0.tenants().list().await?, self.0.consumers().list().await?);
            let (mut findings, mut count) = (Vec::new(), 0);
            for consumer in consumers {
                let Some(tenant) = tenants.iter().find(|tenant| tenant.name == consumer.tenant)
                else {
                    continue; // it was deleted meanwhile
                };
                // A policy that cannot be read is the consumer's own failure, which hosts show.
                let Some(reference) = consumer.policy().ok().and_then(|policy| policy.reference)
                else {
                    continue;
                };
                count += 1;
                findings.extend(self.store_fault(tenant, &consumer, &reference.store).await?);
            }
            Ok::<_, InboxError>((findings, count))
        };
        match found.await {
            Ok((_, 0)) => Vec::new(),
            Ok((findings, count)) if findings.is_empty() => {
                let found = format!(
                    "the consumers whose messages refer to payloads, {count}, have access to their \
                        stores"
                );
                vec![self.of_store(Severity::Ok, found)]
            }
            Ok((findings, _)) => findings,
            Err(error) => {
                let found = format!("the database does not tell: {error}");
                vec![self.of_store(Severity::Unknown, found)]
            }
        }
    }

    /// Returns a finding where a tenant cannot use the store that a policy of it names.
    async fn store_fault(
        &self,
        tenant: &Tenant,
        consumer: &Consumer,
        store: &str,
    ) -> Result<Option<Finding>, InboxError> {
        let of = format!("{}/{}", consumer.tenant, consumer.name);
        let stores = self.0.tenant_stores();
        let Some(row) = stores.row(tenant.tenant_id, store).await? else {
            let found = format!("consumer `{of}` names the store `{store}`, without access to it");
            let advice = format!("oncebox tenant store set {} {store} …", tenant.name);
            return Ok(Some(self.of_store(Severity::Warning, found).advise(advice)));
        };
        Ok(stores.open(tenant, store, &row).err().map(|error| {
            let found = format!("consumer `{of}` cannot use the store `{store}`: {error}");
            let advice = "run it with the settings of a host, or through its API";
            self.of_store(Severity::Warning, found).advise(advice)
        }))
    }

    fn of_store(&self, severity: Severity, found: String) -> Finding {
        self.of_host_database(CHECK, severity, found)
    }
}
