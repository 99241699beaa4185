//! Endpoints: hosts may still send to each of them, by the operator's settings and the tenant's
//! limits as they are now.

use oncebox_model::error::InboxError;

use super::{Finding, Severity};
use crate::{handles::Doctor, tenants::Tenant};

const CHECK: &str = "endpoints";

impl Doctor<'_> {
    /// Checks that each endpoint can be opened and that its host is still allowed. It connects to
    /// none. Returns nothing where there is no endpoint.
    pub(super) async fn endpoints_are_allowed(&self) -> Vec<Finding> {
        let found = async {
            let (mut findings, mut count) = (Vec::new(), 0);
            for tenant in self.0.tenants().list().await? {
                if tenant.state.is_deleting() {
                    continue;
                }
                let endpoints = match self.0.endpoints().list(&tenant.name).await {
                    Err(InboxError::NotFound(_)) => continue, // it was deleted meanwhile
                    endpoints => endpoints?,
                };
                count += endpoints.len();
                for endpoint in endpoints {
                    findings.extend(self.endpoint_fault(&tenant, &endpoint.name).await?);
                }
            }
            Ok::<_, InboxError>((findings, count))
        };
        match found.await {
            Ok((_, 0)) => Vec::new(),
            Ok((findings, count)) if findings.is_empty() => {
                let found = format!("the hosts of the endpoints, {count}, are allowed");
                vec![self.of_endpoint(Severity::Ok, found)]
            }
            Ok((findings, _)) => findings,
            Err(error) => {
                let found = format!("the database does not tell: {error}");
                vec![self.of_endpoint(Severity::Unknown, found)]
            }
        }
    }

    /// Returns a finding where nothing is sent to an endpoint.
    async fn endpoint_fault(
        &self,
        tenant: &Tenant,
        name: &str,
    ) -> Result<Option<Finding>, InboxError> {
        let of = format!("endpoint `{name}` of tenant `{}`", tenant.name);
        let endpoints = self.0.endpoints();
        let opened = match endpoints.open(tenant.tenant_id, name).await {
            Ok(None) => return Ok(None), // it was removed meanwhile
            Ok(Some(opened)) => opened,
            Err(error @ (InboxError::Sealed(_) | InboxError::Invalid(_))) => {
                let found = format!("{of} cannot be used: {error}");
                let advice = format!(
                    "oncebox endpoint set {name} --tenant {} … --signing-secret-file … (or \
                        --unsigned)",
                    tenant.name
                );
                return Ok(Some(self.of_endpoint(Severity::Warning, found).advise(advice)));
            }
            Err(error) => return Err(error),
        };
        if self.0.sender.is_none() {
            let found = format!("whether hosts may send to {of} is not known here");
            let advice = "run it with the settings of a host, or through its API";
            return Ok(Some(self.of_endpoint(Severity::Unknown, found).advise(advice)));
        }
        Ok(endpoints.check_hosts(&opened.endpoint).err().map(|error| {
            let found = format!("nothing is sent to {of}: {error}");
            let advice = format!(
                "oncebox tenant limits {} --endpoint-hosts-allowed …, or \
                    `[http_destinations] hosts_allowed`; or oncebox endpoint remove {name} \
                    --tenant {}",
                tenant.name, tenant.name
            );
            self.of_endpoint(Severity::Warning, found).advise(advice)
        }))
    }

    fn of_endpoint(&self, severity: Severity, found: String) -> Finding {
        self.of_host_database(CHECK, severity, found)
    }
}
