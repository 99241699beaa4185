//! The sender of a process.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::SystemTime,
};

use oncebox_model::hooks::{self, Defect};
use openssl::{
    error::ErrorStack,
    ssl::{SslConnector, SslConnectorBuilder, SslMethod, SslVersion},
};
use tokio::time::{Instant, timeout_at};

use crate::{
    address::AddressPolicy,
    address_range::AddressRange,
    allowed_hosts::AllowedHosts,
    connect::{connect, secure, timed_out},
    endpoint::Endpoint,
    error::{HostList, SendError, SendStage},
    exchange::exchange,
    request::{Request, to_http},
    resolve::{Resolve, SystemResolver},
    response::Response,
};

/// The operator's settings of a sender. The default allows nothing.
#[derive(Debug, Clone, Default)]
pub struct SenderOptions {
    /// Hosts that tenants may send to, as far as their own limits allow them too.
    pub allowed_hosts: AllowedHosts,
    /// Hosts among them for which `http:` is allowed. Such a request, with its secrets, can be read
    /// on its way.
    pub plain_http_hosts: AllowedHosts,
    /// Ranges that are allowed although they are not of the public Internet.
    pub private_ranges_allowed: Vec<AddressRange>,
    /// File of certificates (PEM) of trusted authorities, beside the system's.
    pub ca_file: Option<PathBuf>,
}

/// A setting of the sender that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SenderFault {
    /// OpenSSL could not be prepared.
    #[error("failed to prepare TLS of the sender")]
    Tls(#[from] ErrorStack),
    /// The file of authorities.
    #[error("`{}` is not there or holds no certificates in PEM", .0.display())]
    CaFile(PathBuf),
}

/// Sends outgoing messages to HTTP endpoints, for all tenants of a process. It keeps no connection
/// and nothing else between two requests.
pub struct Sender {
    allowed_hosts: AllowedHosts,
    plain_http_hosts: AllowedHosts,
    policy: AddressPolicy,
    /// TLS with the authorities. To read those of the system takes a while, so that a host which
    /// sends nothing does not.
    tls: OnceLock<SslConnector>,
    resolver: Arc<dyn Resolve>,
}

impl Sender {
    /// Creates a sender with the system's resolver.
    ///
    /// # Errors
    ///
    /// A [`SenderFault`] where TLS cannot be prepared with the given file of authorities.
    pub fn new(options: SenderOptions) -> Result<Self, SenderFault> {
        let tls = OnceLock::new();
        if let Some(path) = options.ca_file {
            let mut builder = builder()?;
            builder.set_ca_file(&path).map_err(|_| SenderFault::CaFile(path))?;
            tls.get_or_init(|| builder.build());
        }
        Ok(Self {
            allowed_hosts: options.allowed_hosts,
            plain_http_hosts: options.plain_http_hosts,
            policy: AddressPolicy { private_ranges_allowed: options.private_ranges_allowed },
            tls,
            resolver: Arc::new(SystemResolver),
        })
    }

    /// Returns the sender with another resolver.
    pub fn with_resolver(self, resolver: Arc<dyn Resolve>) -> Self {
        Self { resolver, ..self }
    }

    /// Checks an endpoint against the lists of hosts, without a lookup.
    ///
    /// # Errors
    ///
    /// [`SendError::HostNotAllowed`] or [`SendError::PlainHttp`].
    pub fn check(&self, endpoint: &Endpoint) -> Result<(), SendError> {
        let target = &endpoint.target;
        for (list, hosts) in
            [(HostList::Operator, &self.allowed_hosts), (HostList::Tenant, &endpoint.tenant_hosts)]
        {
            if !hosts.allows(target) {
                return Err(SendError::HostNotAllowed { endpoint: target.authority(), list });
            }
        }
        if !target.is_tls && !self.plain_http_hosts.allows(target) {
            return Err(SendError::PlainHttp { endpoint: target.authority() });
        }
        Ok(())
    }

    /// Sends a message to an endpoint, once, and returns the answer, whatever its status.
    /// [`Verdict::of`](crate::Verdict::of) says what the result means for the message.
    ///
    /// A dropped future ends the request, which may have arrived then.
    ///
    /// # Errors
    ///
    /// A [`SendError`] where a rule refuses the request or there is no answer.
    /// [`SendError::may_have_arrived`] says whether the endpoint may have got it.
    pub async fn send(
        &self,
        endpoint: &Endpoint,
        request: &Request,
    ) -> Result<Response, SendError> {
        let begin = Instant::now();
        let (connected_by, done_by) =
            (begin + endpoint.connect_timeout, begin + endpoint.total_timeout);
        self.check(endpoint)?;
        let http = to_http(endpoint, request, SystemTime::now())?;
        let (name, body_bytes_max) = (endpoint.authority(), endpoint.response_bytes_max);
        let addresses = self.judged_addresses(endpoint, connected_by).await?;
        let stream = connect(&name, &addresses, connected_by).await?;
        if !endpoint.target.is_tls {
            return exchange(&name, stream, http, body_bytes_max, done_by).await;
        }
        let stream =
            secure(&name, self.tls(&name)?, &endpoint.target, stream, connected_by).await?;
        exchange(&name, stream, http, body_bytes_max, done_by).await
    }

    /// Returns TLS for an endpoint, prepared at the first request.
    fn tls(&self, endpoint: &str) -> Result<&SslConnector, SendError> {
        if let Some(tls) = self.tls.get() {
            return Ok(tls);
        }
        let failed = |error: ErrorStack| SendError::Tls {
            endpoint: endpoint.to_owned(),
            why: error.to_string(),
        };
        let tls = builder().map_err(failed)?.build();
        Ok(self.tls.get_or_init(|| tls))
    }

    /// Looks up the addresses of an endpoint, and judges each of them. One that is refused refuses
    /// all: a name that leads into a private network with one of its addresses is no honest one.
    async fn judged_addresses(
        &self,
        endpoint: &Endpoint,
        deadline: Instant,
    ) -> Result<Vec<SocketAddr>, SendError> {
        let target = &endpoint.target;
        let addresses = match target.address() {
            Some(address) => vec![address],
            None => self.look_up(endpoint, &target.server_name(), deadline).await?,
        };
        for address in &addresses {
            let kind = self.policy.refused_as(*address);
            if let Some(kind) = kind.filter(|_| !hooks::sabotage(Defect::AddressesUnjudged)) {
                let (endpoint, address) = (endpoint.authority(), *address);
                return Err(SendError::AddressRefused { endpoint, address, kind });
            }
        }
        Ok(addresses.into_iter().map(|address| SocketAddr::new(address, target.port)).collect())
    }

    /// Looks a name up, once.
    async fn look_up(
        &self,
        endpoint: &Endpoint,
        name: &str,
        deadline: Instant,
    ) -> Result<Vec<IpAddr>, SendError> {
        let found = timeout_at(deadline, self.resolver.resolve(name)).await;
        let found = found.map_err(|_| timed_out(&endpoint.authority(), SendStage::Lookup))?;
        found.map_err(|error| SendError::Lookup {
            endpoint: endpoint.authority(),
            why: error.to_string(),
        })
    }
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender")
            .field("allowed_hosts", &self.allowed_hosts)
            .field("plain_http_hosts", &self.plain_http_hosts)
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}

/// Returns the settings of TLS, with the authorities of the system.
fn builder() -> Result<SslConnectorBuilder, ErrorStack> {
    let mut tls = SslConnector::builder(SslMethod::tls_client())?;
    tls.set_min_proto_version(Some(SslVersion::TLS1_2))?;
    Ok(tls)
}
