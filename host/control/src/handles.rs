//! The handles of [`Control`]: one for each noun, each with about a dozen functions, which stand in
//! the noun's own modules.

use crate::control::Control;

/// Creates, reads, limits, suspends and deletes tenants.
#[derive(Clone, Copy)]
pub struct Tenants<'a>(pub(crate) &'a Control);

/// Opens, prepares and migrates the databases with tenants' inboxes and tables.
#[derive(Clone, Copy)]
pub struct TenantDatabases<'a>(pub(crate) &'a Control);

/// Creates, reads and changes consumers, as operators do.
#[derive(Clone, Copy)]
pub struct Consumers<'a>(pub(crate) &'a Control);

/// Reads the desired states of consumers, and takes hosts' steps towards them.
#[derive(Clone, Copy)]
pub struct Reconciliation<'a>(pub(crate) &'a Control);

/// Deploys versions, moves shares between them, and takes them back.
#[derive(Clone, Copy)]
pub struct Deployments<'a>(pub(crate) &'a Control);

/// Stores versions of handlers and their compiled components.
#[derive(Clone, Copy)]
pub struct Versions<'a>(pub(crate) &'a Control);

/// Installs the capture of effects for shadow trials, and reads their reports.
#[derive(Clone, Copy)]
pub struct Shadows<'a>(pub(crate) &'a Control);

/// Lists, shows, exports and changes messages.
#[derive(Clone, Copy)]
pub struct Messages<'a>(pub(crate) &'a Control);

/// Lists, shows, counts, redrives and discards outgoing messages.
#[derive(Clone, Copy)]
pub struct OutgoingMessages<'a>(pub(crate) &'a Control);

/// Starts, lists, pauses and ends jobs, and works on them.
#[derive(Clone, Copy)]
pub struct Jobs<'a>(pub(crate) &'a Control);

/// Plans, starts, lists, pauses and ends replays of completed messages.
#[derive(Clone, Copy)]
pub struct Replays<'a>(pub(crate) &'a Control);

/// Creates, lists, checks and revokes tokens.
#[derive(Clone, Copy)]
pub struct Tokens<'a>(pub(crate) &'a Control);

/// Records the hosts that run and their reports, and reads them.
#[derive(Clone, Copy)]
pub struct Hosts<'a>(pub(crate) &'a Control);

/// Writes and reads the audit log.
#[derive(Clone, Copy)]
pub struct Audit<'a>(pub(crate) &'a Control);

/// Removes time partitions of the inbox that are past their retention, and shows what goes when.
#[derive(Clone, Copy)]
pub struct Retention<'a>(pub(crate) &'a Control);

/// Writes messages to the archive before their removal, and finds them there.
#[derive(Clone, Copy)]
pub struct Archive<'a>(pub(crate) &'a Control);

/// Measures the size of inboxes, their growth and their size to come.
#[derive(Clone, Copy)]
pub struct Storage<'a>(pub(crate) &'a Control);

/// Gives tenants access to stores, and fetches payloads from there.
#[derive(Clone, Copy)]
pub struct TenantStores<'a>(pub(crate) &'a Control);

/// Gives tenants endpoints outside, and opens them for requests.
#[derive(Clone, Copy)]
pub struct Endpoints<'a>(pub(crate) &'a Control);

/// Keeps the secrets by which consumers know the senders of messages over HTTP.
#[derive(Clone, Copy)]
pub struct Ingress<'a>(pub(crate) &'a Control);

/// Erases what the inbox holds of the payloads of a data subject.
#[derive(Clone, Copy)]
pub struct Erasures<'a>(pub(crate) &'a Control);

/// Checks that tenants are kept apart in the live databases.
#[derive(Clone, Copy)]
pub struct Doctor<'a>(pub(crate) &'a Control);

impl Control {
    /// Returns the handle of tenants.
    pub fn tenants(&self) -> Tenants<'_> {
        Tenants(self)
    }

    /// Returns the handle of the databases with tenants' inboxes and tables.
    pub fn tenant_databases(&self) -> TenantDatabases<'_> {
        TenantDatabases(self)
    }

    /// Returns the handle of consumers.
    pub fn consumers(&self) -> Consumers<'_> {
        Consumers(self)
    }

    /// Returns the handle of the desired states of consumers.
    pub fn reconciliation(&self) -> Reconciliation<'_> {
        Reconciliation(self)
    }

    /// Returns the handle of deployments.
    pub fn deployments(&self) -> Deployments<'_> {
        Deployments(self)
    }

    /// Returns the handle of versions and their compiled components.
    pub fn versions(&self) -> Versions<'_> {
        Versions(self)
    }

    /// Returns the handle of shadow trials.
    pub fn shadows(&self) -> Shadows<'_> {
        Shadows(self)
    }

    /// Returns the handle of messages.
    pub fn messages(&self) -> Messages<'_> {
        Messages(self)
    }

    /// Returns the handle of outgoing messages.
    pub fn outgoing(&self) -> OutgoingMessages<'_> {
        OutgoingMessages(self)
    }

    /// Returns the handle of endpoints.
    pub fn endpoints(&self) -> Endpoints<'_> {
        Endpoints(self)
    }

    /// Returns the handle of messages over HTTP.
    pub fn ingress(&self) -> Ingress<'_> {
        Ingress(self)
    }

    /// Returns the handle of jobs.
    pub fn jobs(&self) -> Jobs<'_> {
        Jobs(self)
    }

    /// Returns the handle of replays.
    pub fn replays(&self) -> Replays<'_> {
        Replays(self)
    }

    /// Returns the handle of tokens.
    pub fn tokens(&self) -> Tokens<'_> {
        Tokens(self)
    }

    /// Returns the handle of hosts.
    pub fn hosts(&self) -> Hosts<'_> {
        Hosts(self)
    }

    /// Returns the handle of the audit log.
    pub fn audit(&self) -> Audit<'_> {
        Audit(self)
    }

    /// Returns the handle of the removal of old messages.
    pub fn retention(&self) -> Retention<'_> {
        Retention(self)
    }

    /// Returns the handle of the archive.
    pub fn archive(&self) -> Archive<'_> {
        Archive(self)
    }

    /// Returns the handle of the size of inboxes.
    pub fn storage(&self) -> Storage<'_> {
        Storage(self)
    }

    /// Returns the handle of tenants' stores.
    pub fn tenant_stores(&self) -> TenantStores<'_> {
        TenantStores(self)
    }

    /// Returns the handle of erasures.
    pub fn erasures(&self) -> Erasures<'_> {
        Erasures(self)
    }

    /// Returns the handle of checks of the live databases.
    pub fn doctor(&self) -> Doctor<'_> {
        Doctor(self)
    }
}
